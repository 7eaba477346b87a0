-- What every step shares; put in front of each of them. Never called by itself.
--
-- KEYS[1] is the root, "{prefix}": every key begins with it, so all of them lie in one slot of a cluster.
-- Keys are made here and in keys.py only:
--   :node:<node>                    hash   a node's free slots, its bids ("bid <capability>"), its last reply to
--                                          a bid; its time to live is the bids' time to live
--   :bids:<capability>              zset   node by price, nodes with a free slot
--   :full:<capability>              zset   node by price, nodes without one
--   :wakes:<node>                   stream awards ("a") and notices of cancellation ("n") for a node
--   :tenants:<capability>           zset   tenant by share, a lower bound; tenants with a waiting intent
--   :budgets:<capability> <tenant>  zset   budget by its negative, the budgets of the tenant's waiting intents
--   :pending:<budget> <capability> <tenant>
--                                   zset   intent by rank
--   :intents:<capability>           hash   intent to its record, all that wait
--   :shares                         zset   tenant by virtual finish time, those ahead of the clock
--   :clock                          string virtual start time of what was served last
--   :awarded:<intent>               string who got it when, and its record, for a while
--   :excluded:<intent>              hash   node to the time until which it is passed over
--   :last:<thread> <tenant>         string node that got the thread's last award
-- A record is {tenant, weight, intent, thread, capability, rank, budget or "inf", attempt}, all text: cjson would
-- round numbers to 14 digits. Times come from the server's clock, in milliseconds.

local ROOT = KEYS[1]
local LOSERS_MAX = 5
local LOOK = LOSERS_MAX + 2
local TENANTS_LOOK = 32
local BUDGETS_LOOK = 64
local PENDING_LOOK = 128
local PENDING_MAX = 100000
local DEDUPE_MS = 5000
local MARK_MS = 60000
local AFFINITY_MS = 3600000
local WAKES_MAX = 4096
local WAKES_MS = 3600000

local TENANT, WEIGHT, INTENT, THREAD, CAPABILITY, RANK, BUDGET, ATTEMPT = 1, 2, 3, 4, 5, 6, 7, 8

local call = redis.call
local time = call('TIME')
local NOW_MS = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)

local function key(name, suffix)
  return ROOT .. ':' .. name .. ':' .. suffix
end

local function exact(number)
  return string.format('%.17g', number)
end

-- Bytewise: Lua's own < on text follows the server's locale.
local function is_text_less(left, right)
  for index = 1, math.min(#left, #right) do
    local a, b = string.byte(left, index), string.byte(right, index)
    if a ~= b then return a < b end
  end
  return #left < #right
end

-- Not tonumber alone: whether it reads "inf" depends on the platform.
local function budget_of(record)
  if record[BUDGET] == 'inf' then return math.huge end
  return tonumber(record[BUDGET])
end

---- offers

-- All offers that can be the winner or among the first losers, best first.
local function offers_for(record, excluded)
  local capability = record[CAPABILITY]
  local last = call('GET', key('last', record[THREAD] .. ' ' .. record[TENANT]))
  local offers, met, gone = {}, {}, {}
  local function meet(node, has_slot)
    met[node] = true
    local packed = call('HGET', key('node', node), 'bid ' .. capability)
    if not packed then
      gone[#gone + 1] = node
      return false
    end
    local bid = cjson.decode(packed)
    local price, parts = bid[1], bid[2]
    if node == last then price, parts = bid[3], bid[4] end
    local offer = {node = node, text = price, price = tonumber(price), parts = parts, has_slot = has_slot}
    local until_ms = excluded[node]
    offer.is_excluded = until_ms ~= nil and until_ms > NOW_MS
    offers[#offers + 1] = offer
    return not offer.is_excluded
  end
  for _, name in ipairs({'bids', 'full'}) do
    local start, seen = 0, 0
    while seen < LOOK do
      local nodes = call('ZRANGE', key(name, capability), start, start + LOOK - 1)
      for _, node in ipairs(nodes) do
        if meet(node, name == 'bids') then seen = seen + 1 end
      end
      if #nodes < LOOK then break end
      start = start + LOOK
    end
  end
  if last and not met[last] then
    if call('ZSCORE', key('bids', capability), last) then
      meet(last, true)
    elseif call('ZSCORE', key('full', capability), last) then
      meet(last, false)
    end
  end
  for _, node in ipairs(gone) do
    call('ZREM', key('bids', capability), node)
    call('ZREM', key('full', capability), node)
  end
  table.sort(offers, function(a, b)
    if a.price ~= b.price then return a.price < b.price end
    return a.node ~= b.node and is_text_less(a.node, b.node)
  end)
  return offers
end

-- The best admissible offer, and the first of the others with the reason why not. Mirrors mesh.bidding.choose.
local function choose(record)
  local excluded = {}
  local flat = call('HGETALL', key('excluded', record[INTENT]))
  for index = 1, #flat, 2 do excluded[flat[index]] = tonumber(flat[index + 1]) end
  local budget = budget_of(record)
  local winner, losers = nil, {}
  for _, offer in ipairs(offers_for(record, excluded)) do
    local reason
    if offer.is_excluded then reason = 'excluded'
    elseif not offer.has_slot then reason = 'no_slot'
    elseif offer.price > budget then reason = 'over_budget'
    elseif winner then reason = 'outbid'
    else winner = offer end
    if reason and #losers < LOSERS_MAX then losers[#losers + 1] = {offer.node, offer.text, reason} end
  end
  return winner, losers
end

local function capabilities_of(node)
  local names = {}
  for name in string.gmatch(call('HGET', key('node', node), 'capabilities') or '', '%S+') do
    names[#names + 1] = name
  end
  return names
end

local function take_slot(node)
  if call('HINCRBY', key('node', node), 'free', -1) > 0 then return end
  for _, capability in ipairs(capabilities_of(node)) do
    local price = call('ZSCORE', key('bids', capability), node)
    if price then
      call('ZREM', key('bids', capability), node)
      call('ZADD', key('full', capability), price, node)
    end
  end
end

local function drop_bids(node)
  for _, capability in ipairs(capabilities_of(node)) do
    call('ZREM', key('bids', capability), node)
    call('ZREM', key('full', capability), node)
  end
  call('DEL', key('node', node))
end

---- intents that wait

local function take_out(record)
  local capability, intent = record[CAPABILITY], record[INTENT]
  local packed = call('HGET', key('intents', capability), intent)
  if not packed then return end
  call('HDEL', key('intents', capability), intent)
  -- As it was put in: the one that is taken out may come with another budget.
  local stored = cjson.decode(packed)
  local of, budget = capability .. ' ' .. stored[TENANT], stored[BUDGET]
  local pending = key('pending', budget .. ' ' .. of)
  call('ZREM', pending, intent)
  if call('EXISTS', pending) == 1 then return end
  call('ZREM', key('budgets', of), budget)
  if call('EXISTS', key('budgets', of)) == 0 then call('ZREM', key('tenants', capability), stored[TENANT]) end
end

local function clock()
  return tonumber(call('GET', ROOT .. ':clock') or '0')
end

local function share_of(tenant, now)
  return math.max(now, tonumber(call('ZSCORE', ROOT .. ':shares', tenant) or '0'))
end

-- Returns whether it is kept: beyond the bound the ledger's sweeper has to offer it again.
local function put_in(record)
  local capability, tenant, intent = record[CAPABILITY], record[TENANT], record[INTENT]
  take_out(record)
  if call('HLEN', key('intents', capability)) >= PENDING_MAX then return false end
  call('HSET', key('intents', capability), intent, cjson.encode(record))
  local of = capability .. ' ' .. tenant
  call('ZADD', key('pending', record[BUDGET] .. ' ' .. of), record[RANK], intent)
  call('ZADD', key('budgets', of), exact(-budget_of(record)), record[BUDGET])
  call('ZADD', key('tenants', capability), 'NX', exact(share_of(tenant, clock())), tenant)
  return true
end

---- matching

-- Hand the intent to the winner; returns the award as text.
local function award(record, winner, losers)
  take_out(record)
  take_slot(winner.node)
  local mark = {winner.node, record[ATTEMPT], exact(NOW_MS), cjson.encode(record)}
  call('SET', key('awarded', record[INTENT]), cjson.encode(mark), 'PX', MARK_MS)
  call('SET', key('last', record[THREAD] .. ' ' .. record[TENANT]), winner.node, 'PX', AFFINITY_MS)
  return cjson.encode({
    record[TENANT], record[INTENT], record[THREAD], record[CAPABILITY],
    winner.node, winner.text, winner.parts, losers, exact(NOW_MS),
  })
end

local function wake(node, field, text)
  call('XADD', key('wakes', node), 'MAXLEN', '~', WAKES_MAX, '*', field, text)
  call('PEXPIRE', key('wakes', node), WAKES_MS)
end

-- Award it at once, or let it wait.
local function place(record)
  local winner, losers = choose(record)
  if winner then
    wake(winner.node, 'a', award(record, winner, losers))
    return 'awarded'
  end
  return put_in(record) and 'pending' or 'refused'
end

local function mark_of(intent)
  local packed = call('GET', key('awarded', intent))
  return packed and cjson.decode(packed)
end

-- The node did not take the intent that was awarded to it.
local function give_back(node, intent)
  local mark = mark_of(intent)
  if not mark or mark[1] ~= node then return 'unknown' end
  call('DEL', key('awarded', intent))
  return place(cjson.decode(mark[4]))
end

-- Awards that lie in a node's stream after the cursor: {id, award as text} each.
local function unread_awards(node, cursor)
  local awards = {}
  for _, entry in ipairs(call('XRANGE', key('wakes', node), '(' .. cursor, '+')) do
    if entry[2][1] == 'a' then awards[#awards + 1] = {entry[1], entry[2][2]} end
  end
  return awards
end

-- Awards in the last reply to the node's bids, when that reply did not arrive.
local function lost_awards(node, confirmed)
  local last = call('HMGET', key('node', node), 'reply', 'awards')
  if last[1] and last[2] and tonumber(last[1]) > confirmed then return cjson.decode(last[2]) end
  return {}
end
