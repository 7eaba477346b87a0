-- A ready intent seeks a node: the best admissible bid gets it at once, else it waits in the book.
--
-- ARGV: 1 the intent's record as JSON
-- Returns: awarded, pending, duplicate (it was awarded a moment ago), or refused (too many wait).
-- The same announcement again changes nothing, until DEDUPE_MS after its award; a higher attempt is another one.

local record = cjson.decode(ARGV[1])
local mark = mark_of(record[INTENT])
if mark and tonumber(mark[3]) > NOW_MS - DEDUPE_MS and tonumber(record[ATTEMPT]) <= tonumber(mark[2]) then
  return 'duplicate'
end
return place(record)
