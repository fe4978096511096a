-- Renews a lease, or ends it. A lapsed lease stays lapsed.
--
-- KEYS
--   worker  hash  capsule:{W:<incarnation>}
-- ARGV
--   token          of the lease
--   lease_ms       from now on; 0 ends it
--   lapsed_ttl_ms  until the lease expires from Redis, after its end
-- RETURNS {DONE}
-- REFUSES {LOST} a lease that has lapsed or never existed
-- USES common

local worker_key = KEYS[1]
local token, lease_ms, lapsed_ttl_ms = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])

local now_us = clock_us()
local got = redis.call('HMGET', worker_key, 'token', 'until')
if got[1] ~= token or tonumber(got[2]) <= now_us then return {LOST} end
redis.call('HSET', worker_key, 'until', whole(now_us + lease_ms * 1000))
redis.call('PEXPIRE', worker_key, lease_ms + lapsed_ttl_ms)
return {DONE}
