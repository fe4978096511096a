-- Records how a step ended: its output, that it was undone, or that it failed midway.
--
-- KEYS
--   steps       hash  capsule:{E:<execution>}:steps
--   operations  hash  capsule:{E:<execution>}:operations
-- ARGV
--   operation_id     id of this write
--   age_ms           since the operation was first sent; 0 the first time
--   ttl_ms           until the steps expire
--   start_operation  operation that started it
--   step             its name
--   outcome          output, undone or failed
--   value            the output, or the reason why it failed
-- RETURNS {DONE, output}; the first output that was recorded is the one that counts
-- REFUSES {ABANDONED} an operation that its caller abandoned before it was done
--         {FORGOTTEN} a repeat that is older than the operation log
-- USES common, operation_log

local steps_key, operations_key = KEYS[1], KEYS[2]
local operation_id, age_ms, ttl_ms = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local start_operation, step, outcome, value = ARGV[4], ARGV[5], ARGV[6], ARGV[7]

local log = read_log(operations_key, operation_id, age_ms, clock_us())
if refuse_repeat(log) then return refuse_repeat(log) end
local output = redis.call('HGET', steps_key, 'output:' .. step)
if log.result or output then return {DONE, output or ''} end

local packed = redis.call('HGET', steps_key, 'step:' .. step)
local known = packed and cmsgpack.unpack(packed)
local is_mine = known and known.operation == start_operation
if outcome == 'output' then
  redis.call('HSET', steps_key, 'output:' .. step, value)
  redis.call('PEXPIRE', steps_key, ttl_ms)
elseif outcome == 'undone' and is_mine then
  redis.call('HDEL', steps_key, 'step:' .. step)
elseif outcome == 'failed' and is_mine then
  known.reason = value
  redis.call('HSET', steps_key, 'step:' .. step, cmsgpack.pack(known))
end
write_log(operations_key, operation_id, 'ended', log)
return {DONE, outcome == 'output' and value or ''}
