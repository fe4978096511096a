-- Starts the lease of a worker's incarnation. An incarnation has one lease in its life.
--
-- KEYS
--   worker      hash  capsule:{W:<incarnation>}
--   operations  hash  capsule:{W:<incarnation>}:operations
-- ARGV
--   operation_id   id of this write
--   age_ms         since the operation was first sent; 0 the first time
--   lease_ms       until it lapses
--   lapsed_ttl_ms  until the lease expires from Redis, after its end
-- RETURNS {DONE, token}
-- REFUSES {ABANDONED} an operation that its caller abandoned before it was done
--         {FORGOTTEN} a repeat that is older than the operation log
--         {HELD, token} an incarnation that has or had its lease
-- USES common, operation_log

local worker_key, operations_key = KEYS[1], KEYS[2]
local operation_id, age_ms = ARGV[1], tonumber(ARGV[2])
local lease_ms, lapsed_ttl_ms = tonumber(ARGV[3]), tonumber(ARGV[4])

local now_us = clock_us()
local log = read_log(operations_key, operation_id, age_ms, now_us)
if refuse_repeat(log) then return refuse_repeat(log) end
if log.result then return {DONE, log.result} end
local known = redis.call('HGET', worker_key, 'token')
if known then return {HELD, known} end

local token = whole(now_us)
redis.call('HSET', worker_key, 'token', token, 'until', whole(now_us + lease_ms * 1000))
redis.call('PEXPIRE', worker_key, lease_ms + lapsed_ttl_ms)
write_log(operations_key, operation_id, token, log)
return {DONE, token}
