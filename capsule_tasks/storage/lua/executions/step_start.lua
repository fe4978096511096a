-- Records that a step of an execution starts, so that it does not happen twice.
--
-- KEYS
--   steps       hash  capsule:{E:<execution>}:steps
--   operations  hash  capsule:{E:<execution>}:operations
-- ARGV
--   operation_id  id of this write
--   age_ms        since the operation was first sent; 0 the first time
--   ttl_ms        until the steps expire
--   step          its name
--   fingerprint   of the arguments
--   retry         1 to start it again where it is unknown whether it happened
-- RETURNS {DONE} to go ahead
-- REFUSES {ABANDONED} an operation that its caller abandoned before it was done
--         {FORGOTTEN} a repeat that is older than the operation log
--         {LOST} an operation whose step was undone since
--         {FINISHED, output} a step that was done before
--         {UNCERTAIN, started ms, reason} a step that was started and did not end
--         {CHANGED} a step that was started with other arguments
-- USES common, operation_log

local steps_key, operations_key = KEYS[1], KEYS[2]
local operation_id, age_ms, ttl_ms = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local step, fingerprint, retry = ARGV[4], ARGV[5], ARGV[6] == '1'

local now_us = clock_us()
local log = read_log(operations_key, operation_id, age_ms, now_us)
if refuse_repeat(log) then return refuse_repeat(log) end
local packed = redis.call('HGET', steps_key, 'step:' .. step)
local known = packed and cmsgpack.unpack(packed)
if log.result then
  return known and known.operation == operation_id and {DONE} or {LOST}
end
if known and known.fingerprint ~= fingerprint then return {CHANGED} end
local output = redis.call('HGET', steps_key, 'output:' .. step)
if output then return {FINISHED, output} end
if known and not retry then return {UNCERTAIN, known.at, known.reason or ''} end

local entry = {operation = operation_id, fingerprint = fingerprint, at = math.floor(now_us / 1000)}
redis.call('HSET', steps_key, 'step:' .. step, cmsgpack.pack(entry))
redis.call('PEXPIRE', steps_key, ttl_ms)
write_log(operations_key, operation_id, 'started', log)
return {DONE}
