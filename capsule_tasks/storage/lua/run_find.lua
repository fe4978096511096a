-- Tells in which session a run lives, and keeps that known for as long as runs are asked for.
--
-- KEYS
--   place  hash  capsule:{R:<run>}
-- ARGV
--   ttl_ms  until it is forgotten; a longer time that is left stays
-- RETURNS {DONE, session}
-- REFUSES {MISSING} a run that nobody has placed
-- USES once

local place_key = KEYS[1]
local ttl_ms = tonumber(ARGV[1])

local session = redis.call('HGET', place_key, 'session')
if not session then return {MISSING} end
if redis.call('PTTL', place_key) < ttl_ms then redis.call('PEXPIRE', place_key, whole(ttl_ms)) end
return {DONE, session}
