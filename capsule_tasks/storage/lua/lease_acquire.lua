-- Begins the lease of a worker's incarnation. An incarnation has one lease in its life.
--
-- KEYS
--   worker   hash  capsule:{W:<incarnation>}
--   batches  hash  capsule:{W:<incarnation>}:batches
-- ARGV
--   operation  id of this write
--   age_ms     since it was first sent; 0 the first time
--   lease_ms   until it lapses
--   keep_ms    until it is forgotten, after the last renewal
-- RETURNS {DONE, token}
-- REFUSES {GIVEN_UP} an operation whose caller left before it was done
--         {FORGOTTEN} a repeat that the memory does not reach back to
--         {HELD, token} an incarnation that had its lease
-- USES once

local worker_key, batches_key = KEYS[1], KEYS[2]
local operation, age_ms = ARGV[1], tonumber(ARGV[2])
local lease_ms, keep_ms = tonumber(ARGV[3]), tonumber(ARGV[4])

local now_us = clock_us()
local memory = recall(batches_key, operation, age_ms, now_us)
if barred(memory) then return barred(memory) end
if memory.result then return {DONE, memory.result} end
local known = redis.call('HGET', worker_key, 'token')
if known then return {HELD, known} end

local token = whole(now_us)
redis.call('HSET', worker_key, 'token', token, 'until', whole(now_us + lease_ms * 1000))
redis.call('PEXPIRE', worker_key, lease_ms + keep_ms)
remember(batches_key, operation, token, memory)
return {DONE, token}
