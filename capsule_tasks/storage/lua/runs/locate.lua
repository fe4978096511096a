-- Records in which session a run lives; it never changes.
--
-- KEYS
--   location  hash  capsule:{R:<run>}
-- ARGV
--   session  of the run
--   ttl_ms   until the entry expires; a longer remaining time stays
-- RETURNS {DONE}
-- REFUSES {CONFLICT, session} a run that lives in another session
-- USES common

local location_key = KEYS[1]
local session, ttl_ms = ARGV[1], tonumber(ARGV[2])

local known = redis.call('HGET', location_key, 'session')
if known and known ~= session then return {CONFLICT, known} end
redis.call('HSET', location_key, 'session', session)
if redis.call('PTTL', location_key) < ttl_ms then
  redis.call('PEXPIRE', location_key, whole(ttl_ms))
end
return {DONE}
