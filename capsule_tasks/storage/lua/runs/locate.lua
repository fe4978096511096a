-- Records in which session a run lives, and its first agent; they never change.
--
-- KEYS
--   location  hash  capsule:{R:<run>}
-- ARGV
--   session  of the run
--   agent    with which it begins
--   ttl_ms   until the entry expires; a longer remaining time stays
-- RETURNS {DONE, agent}
-- REFUSES {CONFLICT, session} a run that lives in another session
-- USES common

local location_key = KEYS[1]
local session, agent, ttl_ms = ARGV[1], ARGV[2], tonumber(ARGV[3])

local known = redis.call('HGET', location_key, 'session')
if known and known ~= session then return {CONFLICT, known} end
redis.call('HSET', location_key, 'session', session)
redis.call('HSETNX', location_key, 'agent', agent)
if redis.call('PTTL', location_key) < ttl_ms then
  redis.call('PEXPIRE', location_key, whole(ttl_ms))
end
return {DONE, redis.call('HGET', location_key, 'agent')}
