-- Records what tool calls gave. Whoever started a call may say so, also after losing the run:
-- it happened, and the next owner needs to know.
--
-- KEYS
--   ledger   hash  capsule:{S:<session>}:run:<run>:ledger
--   batches  hash  capsule:{S:<session>}:batches
-- ARGV
--   operation  id of this write
--   age_ms     since it was first sent; 0 the first time
--   token      of the claim under which the calls were started
--   part...    call, output, call, output, and so on
-- RETURNS {DONE}
-- REFUSES {GIVEN_UP} an operation whose caller left before it was done
--         {FORGOTTEN} a repeat that the memory does not reach back to
--         {UNKNOWN, call} a call that was never started
--         {STALE, call} a call that somebody else has started since
--         {FINISHED, call} a call that gave something else before
-- USES once, run

local ledger_key, batches_key = KEYS[1], KEYS[2]
local operation, age_ms, token = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local FIRST = 4

local memory = recall(batches_key, operation, age_ms, clock_us())
if barred(memory) then return barred(memory) end
if memory.result then return {DONE} end
for index = FIRST, #ARGV, 2 do
  local known = entry_of(ledger_key, 'call:' .. ARGV[index])
  if not known then return {UNKNOWN, ARGV[index]} end
  local output = redis.call('HGET', ledger_key, 'out:' .. ARGV[index])
  if output and output ~= ARGV[index + 1] then return {FINISHED, ARGV[index]} end
  if not output and known.by ~= token then return {STALE, ARGV[index]} end
end

for index = FIRST, #ARGV, 2 do
  redis.call('HSET', ledger_key, 'out:' .. ARGV[index], ARGV[index + 1])
end
remember(batches_key, operation, 'finished', memory)
return {DONE}
