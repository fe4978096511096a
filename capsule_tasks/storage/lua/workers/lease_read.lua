-- Reads how long a worker's lease lasts.
--
-- KEYS
--   worker  hash  capsule:{W:<incarnation>}
-- ARGV
-- RETURNS {DONE, ms}; 0 where it has lapsed
-- REFUSES {MISSING} a lease that never existed, or has expired from Redis
-- USES common

local worker_key = KEYS[1]

local until_us = redis.call('HGET', worker_key, 'until')
if not until_us then return {MISSING} end
return {DONE, math.max(0, math.ceil((tonumber(until_us) - clock_us()) / 1000))}
