-- Records what tool calls gave. Whoever started a call may say so, also after losing the run:
-- it happened, and the next owner needs to know. So may the present owner, who has found out what
-- became of a call that it inherited.
--
-- KEYS
--   run      hash  capsule:{S:<session>}:run:<run>
--   ledger   hash  capsule:{S:<session>}:run:<run>:ledger
--   batches  hash  capsule:{S:<session>}:batches
-- ARGV
--   operation  id of this write
--   age_ms     since it was first sent; 0 the first time
--   token      of the claim under which the calls were started, or of the present owner's
--   part...    call, output, call, output, and so on
-- RETURNS {DONE}
-- REFUSES {GIVEN_UP} an operation whose caller left before it was done
--         {FORGOTTEN} a repeat that the memory does not reach back to
--         {MISSING} a run that does not exist
--         {UNKNOWN, call} a call that was never started
--         {STALE, status, token} a claim that is over, and that has not started one of the calls
--         {FINISHED, call} a call that gave something else before
-- USES once, run

local run_key, ledger_key, batches_key = KEYS[1], KEYS[2], KEYS[3]
local operation, age_ms, token = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local FIRST = 4

local memory = recall(batches_key, operation, age_ms, clock_us())
if barred(memory) then return barred(memory) end
if memory.result then return {DONE} end
local run = load_run(run_key)
if not run then return {MISSING} end
local is_owner = run.status == 'running' and whole(run.token) == token
for index = FIRST, #ARGV, 2 do
  local known = entry_of(ledger_key, 'call:' .. ARGV[index])
  if not known then return {UNKNOWN, ARGV[index]} end
  local output = redis.call('HGET', ledger_key, 'out:' .. ARGV[index])
  if output and output ~= ARGV[index + 1] then return {FINISHED, ARGV[index]} end
  if not output and known.by ~= token and not is_owner then
    return {STALE, run.status, whole(run.token)}
  end
end

for index = FIRST, #ARGV, 2 do
  redis.call('HSET', ledger_key, 'out:' .. ARGV[index], ARGV[index + 1])
end
remember(batches_key, operation, 'finished', memory)
return {DONE}
