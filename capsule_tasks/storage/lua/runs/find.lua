-- Reads in which session a run lives, and renews the entry.
--
-- KEYS
--   location  hash  capsule:{R:<run>}
-- ARGV
--   ttl_ms  until the entry expires; a longer remaining time stays
-- RETURNS {DONE, session, agent}
-- REFUSES {MISSING} a run that was never created, or has expired
-- USES common

local location_key = KEYS[1]
local ttl_ms = tonumber(ARGV[1])

local got = redis.call('HMGET', location_key, 'session', 'agent')
if not got[1] then return {MISSING} end
if redis.call('PTTL', location_key) < ttl_ms then
  redis.call('PEXPIRE', location_key, whole(ttl_ms))
end
return {DONE, got[1], got[2] or ''}
