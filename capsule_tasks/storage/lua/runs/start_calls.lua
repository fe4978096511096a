-- Records that tool calls start, so that none happens twice.
--
-- KEYS
--   run         hash  capsule:{S:<session>}:run:<run>
--   ledger      hash  capsule:{S:<session>}:run:<run>:ledger
--   operations  hash  capsule:{S:<session>}:operations
-- ARGV
--   operation_id  id of this write
--   age_ms        since the operation was first sent; 0 the first time
--   ttl_ms        until the run expires
--   token         of the owner's claim
--   calls         {call, fingerprint, retry} each, in MessagePack
-- RETURNS {DONE, cancel, {DONE} | {FINISHED, output} | {UNCERTAIN, started ms}...}, one for each
--         call: go ahead; its output; or it was started and did not finish
-- REFUSES {ABANDONED} an operation that its caller abandoned before it was done
--         {FORGOTTEN} a repeat that is older than the operation log
--         {MISSING} a run that does not exist
--         {STALE, status, token} a claim that is over
--         {CHANGED, call} a call that is known with another tool or other arguments
--         {WAITING, call} a call that waits for an approval, or was rejected
-- USES common, operation_log, run

local run_key, ledger_key, operations_key = KEYS[1], KEYS[2], KEYS[3]
local operation_id, age_ms, ttl_ms = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local token, calls = tonumber(ARGV[4]), cmsgpack.unpack(ARGV[5])

local function refusal(wanted)
  local call, fingerprint = wanted[1], wanted[2]
  for _, kind in ipairs({'approval:', 'decision:', 'call:'}) do
    local known = entry_of(ledger_key, kind .. call)
    if known and known.fingerprint ~= fingerprint then return {CHANGED, call} end
  end
  -- Also without a request: the call may have been rejected while the run was being parked again.
  local exact = entry_of(ledger_key, 'decision:' .. call)
  if exact and not exact.approved then return {WAITING, call} end
  local request = entry_of(ledger_key, 'approval:' .. call)
  if not request then return nil end
  local decision = decision_on(ledger_key, request)
  if not decision or not decision.approved then return {WAITING, call} end
  return nil
end

local function outcome(wanted, now_us)
  local call, fingerprint, retry = wanted[1], wanted[2], wanted[3]
  local output = redis.call('HGET', ledger_key, 'output:' .. call)
  if output then return {FINISHED, output} end
  local known = entry_of(ledger_key, 'call:' .. call)
  if known and known.operation == operation_id then return {DONE} end
  if known and not retry then return {UNCERTAIN, known.at} end
  local at = math.floor(now_us / 1000)
  local entry = {fingerprint = fingerprint, by = whole(token), at = at, operation = operation_id}
  redis.call('HSET', ledger_key, 'call:' .. call, cmsgpack.pack(entry))
  return {DONE}
end

local now_us = clock_us()
local log = read_log(operations_key, operation_id, age_ms, now_us)
if refuse_repeat(log) then return refuse_repeat(log) end
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
if not log.result then write_log(operations_key, operation_id, 'started', log) end
return reply
