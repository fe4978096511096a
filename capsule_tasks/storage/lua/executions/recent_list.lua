-- Reads a page of the index of recent executions, latest first.
--
-- KEYS
--   order    zset  capsule:{recent}:order
--   entries  hash  capsule:{recent}:entries
-- ARGV
--   before  microseconds: only those recorded before that; or empty
--   count   of executions at most
-- RETURNS {DONE, id, recorded us, record, …}
-- REFUSES nothing
-- USES common, index

local order_key, entries_key = KEYS[1], KEYS[2]
local before, count = ARGV[1], tonumber(ARGV[2])

return reply_page(order_key, entries_key, before, count, function(entry)
  return entry and entry:match('^%d+:%d+:(.*)$')
end)
