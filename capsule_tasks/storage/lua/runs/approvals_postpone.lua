-- Postpones a call that seemed to be due, so that it does not hide the calls after it.
--
-- KEYS
--   due  zset  capsule:{approvals}:due
-- ARGV
--   member  of the index
--   at_ms   when its time passes; 0 if unknown
--   min_ms  earliest time from now
-- RETURNS {DONE, ms until it is due}
-- REFUSES nothing
-- USES common, two_name_index

local due_key = KEYS[1]
local member, at_ms, min_ms = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])

return postpone_in_index(due_key, member, at_ms, min_ms)
