-- Gives up the places of sessions of a tenant that are no longer live.
--
-- KEYS
--   live  zset  capsule:{T:<tenant>}:live
-- ARGV
--   session_id...  that were released
-- RETURNS {DONE}
-- REFUSES nothing
-- USES common

local live_key = KEYS[1]
local FIRST = 1

for n = FIRST, #ARGV do redis.call('ZREM', live_key, ARGV[n]) end
return {DONE}
