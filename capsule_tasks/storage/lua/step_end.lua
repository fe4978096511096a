-- Records how a step ended: what it gave, that it was not made, or that it failed midway.
--
-- KEYS
--   steps    hash  capsule:{E:<execution>}:steps
--   batches  hash  capsule:{E:<execution>}:batches
-- ARGV
--   operation  id of this write
--   age_ms     since it was first sent; 0 the first time
--   ttl_ms     until the steps are forgotten
--   begun      operation that began it
--   step       its name
--   outcome    output, undone or failed
--   value      the output, or why it failed
-- RETURNS {DONE, output}; the output is the one that counts: the first that was recorded
-- REFUSES {GIVEN_UP} an operation whose caller left before it was done
--         {FORGOTTEN} a repeat that the memory does not reach back to
-- USES once

local steps_key, batches_key = KEYS[1], KEYS[2]
local operation, age_ms, ttl_ms = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local begun, step, outcome, value = ARGV[4], ARGV[5], ARGV[6], ARGV[7]

local memory = recall(batches_key, operation, age_ms, clock_us())
if barred(memory) then return barred(memory) end
local output = redis.call('HGET', steps_key, 'out:' .. step)
if memory.result or output then return {DONE, output or ''} end

local packed = redis.call('HGET', steps_key, 'step:' .. step)
local known = packed and cmsgpack.unpack(packed)
local is_mine = known and known.operation == begun
if outcome == 'output' then
  redis.call('HSET', steps_key, 'out:' .. step, value)
  redis.call('PEXPIRE', steps_key, ttl_ms)
elseif outcome == 'undone' and is_mine then
  redis.call('HDEL', steps_key, 'step:' .. step)
elseif outcome == 'failed' and is_mine then
  known.reason = value
  redis.call('HSET', steps_key, 'step:' .. step, cmsgpack.pack(known))
end
remember(batches_key, operation, 'ended', memory)
return {DONE, outcome == 'output' and value or ''}
