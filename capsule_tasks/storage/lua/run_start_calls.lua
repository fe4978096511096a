-- Records that tool calls are about to be made, so that none is made twice.
--
-- KEYS
--   run      hash  capsule:{S:<session>}:run:<run>
--   ledger   hash  capsule:{S:<session>}:run:<run>:ledger
--   batches  hash  capsule:{S:<session>}:batches
-- ARGV
--   operation  id of this write
--   age_ms     since it was first sent; 0 the first time
--   ttl_ms     until the run is forgotten
--   token      of the owner's claim
--   calls      {call, print, retry} each, in MessagePack
-- RETURNS {DONE, cancel, {DONE} | {FINISHED, output} | {UNCERTAIN, started ms}...}, one for each
--         call: go ahead, here is what it gave, or it was started and nobody knows more
-- REFUSES {GIVEN_UP} an operation whose caller left before it was done
--         {FORGOTTEN} a repeat that the memory does not reach back to
--         {MISSING} a run that does not exist
--         {STALE, status, token} a claim that is over
--         {CHANGED, call} a call that was known with another tool or other arguments
--         {WAITING, call} a call that waits for an approval, or was rejected
-- USES once, run

local run_key, ledger_key, batches_key = KEYS[1], KEYS[2], KEYS[3]
local operation, age_ms, ttl_ms = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local token, calls = tonumber(ARGV[4]), cmsgpack.unpack(ARGV[5])

local function refusal(wanted)
  local call, print = wanted[1], wanted[2]
  for _, kind in ipairs({'ask:', 'dec:', 'call:'}) do
    local known = entry_of(ledger_key, kind .. call)
    if known and known.print ~= print then return {CHANGED, call} end
  end
  -- Also where nothing is asked any more: a rejection may have come as the run was parked again.
  local exact = entry_of(ledger_key, 'dec:' .. call)
  if exact and not exact.approved then return {WAITING, call} end
  local ask = entry_of(ledger_key, 'ask:' .. call)
  if not ask then return nil end
  local decision = decision_on(ledger_key, ask)
  if not decision or not decision.approved then return {WAITING, call} end
  return nil
end

local function outcome(wanted, now_us)
  local call, print, retry = wanted[1], wanted[2], wanted[3]
  local output = redis.call('HGET', ledger_key, 'out:' .. call)
  if output then return {FINISHED, output} end
  local known = entry_of(ledger_key, 'call:' .. call)
  if known and known.operation == operation then return {DONE} end
  if known and not retry then return {UNCERTAIN, known.at} end
  local at = math.floor(now_us / 1000)
  local entry = {print = print, by = whole(token), at = at, operation = operation}
  redis.call('HSET', ledger_key, 'call:' .. call, cmsgpack.pack(entry))
  return {DONE}
end

local now_us = clock_us()
local memory = recall(batches_key, operation, age_ms, now_us)
if barred(memory) then return barred(memory) end
local run = load_run(run_key)
if not run then return {MISSING} end
if run.status ~= 'running' or run.token ~= token then
  return {STALE, run.status, whole(run.token)}
end
for _, wanted in ipairs(calls) do
  local refused = refusal(wanted)
  if refused then return refused end
end

local reply = {DONE, run.cancel}
for index, wanted in ipairs(calls) do reply[index + 2] = outcome(wanted, now_us) end
redis.call('PEXPIRE', ledger_key, ttl_ms)
if not memory.result then remember(batches_key, operation, 'started', memory) end
return reply
