-- Postpones the next look at a run whose message may not have been sent.
--
-- KEYS
--   unsent  zset  capsule:{runs}:unsent
-- ARGV
--   member  of the index
--   at_ms   when to look; 0 if unknown
--   min_ms  earliest time from now
-- RETURNS {DONE, ms until it is due}
-- REFUSES nothing
-- USES common, two_name_index

local unsent_key = KEYS[1]
local member, at_ms, min_ms = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])

return postpone_in_index(unsent_key, member, at_ms, min_ms)
