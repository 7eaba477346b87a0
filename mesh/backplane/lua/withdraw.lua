-- A node leaves the book; what was awarded to it and did not reach it goes elsewhere or waits.
--
-- ARGV: 1 node, 2 id of the last wake that it read, 3 number of the last reply to its bids that it got
-- Returns: how many awards were given to others.
-- Its stream stays: it may still have to cancel what it runs.

local node = ARGV[1]
local lost = lost_awards(node, tonumber(ARGV[3]))
for _, entry in ipairs(unread_awards(node, ARGV[2])) do
  call('XDEL', key('wakes', node), entry[1])
  lost[#lost + 1] = entry[2]
end
drop_bids(node)
for _, text in ipairs(lost) do give_back(node, cjson.decode(text)[2]) end
return #lost
