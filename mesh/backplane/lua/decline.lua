-- A node gives an award back: it is passed over for a while, and the intent goes elsewhere or waits.
--
-- ARGV: 1 node, 2 intent, 3 how long it is passed over in milliseconds, 4 "thread tenant"
-- Returns: awarded, pending, refused, or unknown (the award is too old, or another node has the intent now).
-- The declining node's slot stays taken until its next bid: only the node knows why it declined.

local node, intent, exclude_ms = ARGV[1], ARGV[2], tonumber(ARGV[3])
if exclude_ms > 0 then
  local excluded = key('excluded', intent)
  call('HSET', excluded, node, exact(NOW_MS + exclude_ms))
  if call('PTTL', excluded) < exclude_ms then call('PEXPIRE', excluded, exclude_ms) end
end
if call('GET', key('last', ARGV[4])) == node then call('DEL', key('last', ARGV[4])) end
return give_back(node, intent)
