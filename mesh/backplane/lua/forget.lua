-- An intent needs no node any more: it leaves the book, and so does the memory of its award.
--
-- ARGV: 1 the intent's record as JSON
-- Returns: OK

local record = cjson.decode(ARGV[1])
take_out(record)
call('DEL', key('awarded', record[INTENT]), key('excluded', record[INTENT]))
return 'OK'
