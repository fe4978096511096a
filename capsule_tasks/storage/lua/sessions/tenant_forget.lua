-- Erases what Redis has of a tenant, but for its sessions.
--
-- KEYS
--   live      zset  capsule:{T:<tenant>}:live
--   sessions  zset  capsule:{T:<tenant>}:sessions
--   usage     hash  capsule:{T:<tenant>}:usage
-- ARGV
-- RETURNS {DONE}
-- REFUSES nothing
-- USES common

local live_key, sessions_key, usage_key = KEYS[1], KEYS[2], KEYS[3]

redis.call('UNLINK', live_key, sessions_key, usage_key)
return {DONE}
