-- Records which runs an owner is going to hold, and which it no longer holds.
--
-- KEYS
--   worker  hash  capsule:{W:<incarnation>}
--   runs    set   capsule:{W:<incarnation>}:runs
-- ARGV
--   ttl_ms   until the record expires
--   count    how many of the holds are added; the others are removed
--   hold...  a run and the claim that holds it, as JSON
-- RETURNS {DONE, ms of Redis's clock}
-- REFUSES {MISSING} a lease that never existed, or has expired from Redis
--         {LOST} a lease that has lapsed
-- USES common, holds

local worker_key, runs_key = KEYS[1], KEYS[2]
local ttl_ms, count = ARGV[1], tonumber(ARGV[2])
local FIRST = 3

if redis.call('EXISTS', worker_key) == 0 then return {MISSING} end
if has_lapsed(worker_key) then return {LOST} end
each_slice('SREM', runs_key, FIRST + count, #ARGV)
each_slice('SADD', runs_key, FIRST, FIRST + count - 1)
redis.call('PEXPIRE', runs_key, ttl_ms)
return {DONE, whole(math.floor(clock_us() / 1000))}
