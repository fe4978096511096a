-- Tells how long a worker's lease lasts.
--
-- KEYS
--   worker  hash  capsule:{W:<incarnation>}
-- ARGV
-- RETURNS {DONE, ms}; 0 where it has lapsed or never was
-- REFUSES nothing
-- USES once

local worker_key = KEYS[1]

local until_us = tonumber(redis.call('HGET', worker_key, 'until') or 0)
return {DONE, math.max(0, math.ceil((until_us - clock_us()) / 1000))}
