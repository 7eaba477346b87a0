-- A node replaces its standing bids and its free slots, and gets pending intents at once.
--
-- ARGV: 1 node, 2 free slots, 3 time to live in milliseconds, 4 id of the last wake that it read,
--       5 number of the last reply that it got, then for each bid: capability,
--       {price, parts, price with affinity, parts with affinity} as JSON
-- Returns: {number of this reply, award as text, …}
--
-- Slots: awards under way to the node (unread in its stream, or in a reply that it never got) are taken off the
-- free slots that it reports, so that none is handed out twice. A lost reply's awards are sent again.
-- Order: tenants share by weight (start-time fair queueing over all capabilities: the tenant with the least
-- virtual time goes first, and each award costs it 1 / weight); within a tenant, and among tenants that are even,
-- the higher priority goes first, then the older intent. Without slots nothing is handed out.
-- Bounds: of a tenant's intents those that can pay are looked at, by budget, the highest BUDGETS_LOOK of them, and
-- PENDING_LOOK intents of each. So those who cannot pay never hide those who can.

local node, ttl_ms, cursor, confirmed = ARGV[1], tonumber(ARGV[3]), ARGV[4], tonumber(ARGV[5])
local node_key = key('node', node)
local replies = lost_awards(node, confirmed)
local number = math.max(confirmed, tonumber(call('HGET', node_key, 'reply') or '0')) + 1
if cursor ~= '0-0' then call('XTRIM', key('wakes', node), 'MINID', cursor) end
local free = math.max(0, tonumber(ARGV[2]) - #replies - #unread_awards(node, cursor))

drop_bids(node)
local prices, names = {}, {}
for index = 6, #ARGV, 2 do
  local capability, packed = ARGV[index], ARGV[index + 1]
  local bid = cjson.decode(packed)
  names[#names + 1] = capability
  prices[capability] = {plain = tonumber(bid[1]), affine = tonumber(bid[3])}
  call('HSET', node_key, 'bid ' .. capability, packed)
  call('ZADD', key(free > 0 and 'bids' or 'full', capability), bid[1], node)
end
call('HSET', node_key, 'free', free, 'capabilities', table.concat(names, ' '))
call('PEXPIRE', node_key, ttl_ms)

local function is_excluded(intent)
  local until_ms = call('HGET', key('excluded', intent), node)
  return until_ms and tonumber(until_ms) > NOW_MS
end

local function is_before(left, right)
  if left.start ~= right.start then return left.start < right.start end
  if left.rank ~= right.rank then return left.rank < right.rank end
  return is_text_less(left.record[INTENT], right.record[INTENT])
end

-- The tenant's next intent for this node, or nil.
local function next_of(capability, tenant, start)
  local of = capability .. ' ' .. tenant
  local price, best = prices[capability], nil
  local function consider(intent, budget)
    local packed = call('HGET', key('intents', capability), intent)
    if not packed or is_excluded(intent) then return false end
    local record = cjson.decode(packed)
    if price.plain > budget and call('GET', key('last', record[THREAD] .. ' ' .. tenant)) ~= node then return false end
    local candidate = {start = start, rank = tonumber(record[RANK]), record = record}
    if not best or is_before(candidate, best) then best = candidate end
    return true
  end
  local least = math.min(price.plain, price.affine)
  local budgets = call('ZRANGE', key('budgets', of), '-inf', exact(-least), 'BYSCORE', 'LIMIT', 0, BUDGETS_LOOK)
  for _, text in ipairs(budgets) do
    local pending = key('pending', text .. ' ' .. of)
    local budget = text == 'inf' and math.huge or tonumber(text)
    for index = 0, PENDING_LOOK - 1 do
      local intent = call('ZRANGE', pending, index, index)[1]
      if not intent or consider(intent, budget) then break end
    end
  end
  return best
end

-- The capability's tenants in their turn, from the given position: {tenant, start} each.
local function tenants_in_turn(capability, position, now)
  local tenants_key = key('tenants', capability)
  local turn
  for _ = 1, 8 do
    local flat = call('ZRANGE', tenants_key, position, position + TENANTS_LOOK - 1, 'WITHSCORES')
    local is_exact = true
    turn = {}
    for index = 1, #flat, 2 do
      local tenant, share = flat[index], share_of(flat[index], now)
      if share ~= tonumber(flat[index + 1]) then
        call('ZADD', tenants_key, exact(share), tenant)
        is_exact = false
      end
      turn[#turn + 1] = {tenant = tenant, start = share}
    end
    if is_exact then break end
  end
  return turn
end

local function next_waiting()
  local now, best = clock(), nil
  for _, capability in ipairs(names) do
    local position, is_found, is_done = 0, false, call('EXISTS', key('tenants', capability)) == 0
    while not is_done do
      local turn = tenants_in_turn(capability, position, now)
      for _, due in ipairs(turn) do
        if best and due.start > best.start then
          is_done = true
          break
        end
        local candidate = next_of(capability, due.tenant, due.start)
        is_found = is_found or candidate ~= nil
        if candidate and (not best or is_before(candidate, best)) then best = candidate end
      end
      position = position + TENANTS_LOOK
      if is_found or #turn < TENANTS_LOOK then is_done = true end
    end
  end
  return best
end

local function charge(waiting)
  local tenant = waiting.record[TENANT]
  call('SET', ROOT .. ':clock', exact(waiting.start))
  call('ZREMRANGEBYSCORE', ROOT .. ':shares', '-inf', exact(waiting.start))
  call('ZADD', ROOT .. ':shares', exact(waiting.start + 1 / tonumber(waiting.record[WEIGHT])), tenant)
end

while tonumber(call('HGET', node_key, 'free')) > 0 do
  local waiting = next_waiting()
  if not waiting then break end
  local winner, losers = choose(waiting.record)
  if not winner then break end
  charge(waiting)
  local text = award(waiting.record, winner, losers)
  if winner.node == node then replies[#replies + 1] = text else wake(winner.node, 'a', text) end
end

call('HSET', node_key, 'reply', number)
if #replies > 0 then call('HSET', node_key, 'awards', cjson.encode(replies)) end
table.insert(replies, 1, tostring(number))
return replies
