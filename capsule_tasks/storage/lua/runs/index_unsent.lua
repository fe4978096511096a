-- Reads runs whose messages should have been sent by now, and when the next one's should.
--
-- KEYS
--   unsent   zset  capsule:{runs}:unsent
--   entries  hash  capsule:{runs}:entries
-- ARGV
--   count  of runs at most
-- RETURNS {DONE, ms until the next one is due or -1, member, details, and so on}
-- REFUSES nothing
-- USES common, two_name_index

local unsent_key, entries_key = KEYS[1], KEYS[2]
local count = ARGV[1]

return due_in_index(unsent_key, entries_key, count)
