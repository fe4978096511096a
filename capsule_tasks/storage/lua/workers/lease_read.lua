-- Reads how long a worker's lease lasts.
--
-- KEYS
--   worker  hash  capsule:{W:<incarnation>}
-- ARGV
-- RETURNS {DONE, ms, ms since it has lapsed}; 0 where it has lapsed, and where it has not
-- REFUSES {MISSING} a lease that never existed, or has expired from Redis
-- USES common

local worker_key = KEYS[1]

local until_us = redis.call('HGET', worker_key, 'until')
if not until_us then return {MISSING} end
local left_ms = math.ceil((tonumber(until_us) - clock_us()) / 1000)
return {DONE, math.max(0, left_ms), math.max(0, -left_ms)}
