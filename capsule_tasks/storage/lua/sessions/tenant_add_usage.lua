-- Adds to what the sessions of a tenant have used, in this window of time and in all.
--
-- KEYS
--   usage       hash  capsule:{T:<tenant>}:usage
--   operations  hash  capsule:{T:<tenant>}:operations
-- ARGV
--   operation_id  id of this write
--   age_ms        since the operation was first sent; 0 the first time
--   cpu_ms        processor time
--   calls         that were done
--   window_ms     length of a window; the first begins at the beginning of time
--   ttl_ms        until the usage expires
-- RETURNS {DONE, processor ms in this window}
-- REFUSES {ABANDONED} an operation that its caller abandoned before it was done
--         {FORGOTTEN} a repeat that is older than the operation log
-- USES common, operation_log

local usage_key, operations_key = KEYS[1], KEYS[2]
local operation_id, age_ms = ARGV[1], tonumber(ARGV[2])
local cpu_ms, calls, window_ms, ttl_ms = ARGV[3], ARGV[4], tonumber(ARGV[5]), ARGV[6]

local log = read_log(operations_key, operation_id, age_ms, clock_us())
if refuse_repeat(log) then return refuse_repeat(log) end
if log.result then return {DONE, tonumber(log.result)} end
local window = whole(log.now_ms - log.now_ms % window_ms)
if redis.call('HGET', usage_key, 'window') ~= window then
  redis.call('HSET', usage_key, 'window', window, 'cpu_ms', 0, 'calls', 0)
end
local used_ms = redis.call('HINCRBY', usage_key, 'cpu_ms', cpu_ms)
redis.call('HINCRBY', usage_key, 'calls', calls)
redis.call('HINCRBY', usage_key, 'total_cpu_ms', cpu_ms)
redis.call('HINCRBY', usage_key, 'total_calls', calls)
redis.call('PEXPIRE', usage_key, ttl_ms)
write_log(operations_key, operation_id, whole(used_ms), log)
return {DONE, used_ms}
