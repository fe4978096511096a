-- Says once and for all in which session a run lives.
--
-- KEYS
--   place  hash  capsule:{R:<run>}
-- ARGV
--   session  that the run is of
--   ttl_ms   until it is forgotten; a longer time that is left stays
-- RETURNS {DONE}
-- REFUSES {CONFLICT, session} a run that lives in another session
-- USES once

local place_key = KEYS[1]
local session, ttl_ms = ARGV[1], tonumber(ARGV[2])

local known = redis.call('HGET', place_key, 'session')
if known and known ~= session then return {CONFLICT, known} end
redis.call('HSET', place_key, 'session', session)
if redis.call('PTTL', place_key) < ttl_ms then redis.call('PEXPIRE', place_key, whole(ttl_ms)) end
return {DONE}
