-- Reads calls whose time limit has passed, and when the next one's will.
--
-- KEYS
--   due      zset  capsule:{approvals}:due
--   entries  hash  capsule:{approvals}:entries
-- ARGV
--   count  of calls at most
-- RETURNS {DONE, ms until the next one is due or -1, member, details, and so on}
-- REFUSES nothing
-- USES common, two_name_index

local due_key, entries_key = KEYS[1], KEYS[2]
local count = ARGV[1]

return due_in_index(due_key, entries_key, count)
