-- Records that a step of an execution is about to be made, so that it is not made twice.
--
-- KEYS
--   steps    hash  capsule:{E:<execution>}:steps
--   batches  hash  capsule:{E:<execution>}:batches
-- ARGV
--   operation  id of this write
--   age_ms     since it was first sent; 0 the first time
--   ttl_ms     until the steps are forgotten
--   step       its name
--   print      of what it is called with
--   retry      1 to make it again where nobody knows whether it was made
-- RETURNS {DONE} to go ahead
-- REFUSES {GIVEN_UP} an operation whose caller left before it was done
--         {FORGOTTEN} a repeat that the memory does not reach back to
--         {LOST} an operation whose step was taken back since
--         {FINISHED, output} a step that was made
--         {UNCERTAIN, started ms, reason} one that was begun, and nobody knows more
--         {CHANGED} one that was begun with something else
-- USES once

local steps_key, batches_key = KEYS[1], KEYS[2]
local operation, age_ms, ttl_ms = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local step, print, retry = ARGV[4], ARGV[5], ARGV[6] == '1'

local now_us = clock_us()
local memory = recall(batches_key, operation, age_ms, now_us)
if barred(memory) then return barred(memory) end
local packed = redis.call('HGET', steps_key, 'step:' .. step)
local known = packed and cmsgpack.unpack(packed)
if memory.result then
  return known and known.operation == operation and {DONE} or {LOST}
end
if known and known.print ~= print then return {CHANGED} end
local output = redis.call('HGET', steps_key, 'out:' .. step)
if output then return {FINISHED, output} end
if known and not retry then return {UNCERTAIN, known.at, known.reason or ''} end

local entry = {operation = operation, print = print, at = math.floor(now_us / 1000)}
redis.call('HSET', steps_key, 'step:' .. step, cmsgpack.pack(entry))
redis.call('PEXPIRE', steps_key, ttl_ms)
remember(batches_key, operation, 'begun', memory)
return {DONE}
