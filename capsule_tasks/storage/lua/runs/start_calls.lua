-- Records that tool calls start, so that none happens twice, and the replies of models from which
-- the calls come. All of it or nothing: a call that is refused leaves no reply in the journal.
--
-- KEYS
--   run         hash  capsule:{S:<session>}:run:<run>
--   ledger      hash  capsule:{S:<session>}:run:<run>:ledger
--   journal     hash  capsule:{S:<session>}:run:<run>:journal
--   operations  hash  capsule:{S:<session>}:operations
-- ARGV
--   operation_id  id of this write
--   age_ms        since the operation was first sent; 0 the first time
--   ttl_ms        until the run expires
--   token         of the owner's claim
--   revision      that the owner has read; checked if there are replies
--   max_bytes     of all replies of one turn
--   calls         {call, fingerprint, retry} each, in MessagePack
--   part...       key, reply, key, reply, and so on
-- RETURNS {DONE, cancel, {DONE} | {DONE, started ms} | {FINISHED, output} | {UNCERTAIN, started ms}
--         ...}, one for each call: go ahead; go ahead, though it was started before and did not
--         finish; its output; or it was started and did not finish
-- REFUSES {ABANDONED} an operation that its caller abandoned before it was done
--         {FORGOTTEN} a repeat that is older than the operation log
--         {MISSING} a run that does not exist
--         {STALE, status, token} a claim that is over
--         {CONFLICT, revision, turn} replies of another revision
--         {FULL, bytes} replies that do not fit into the journal
--         {CHANGED, call} a call that is known with another tool or other arguments
--         {WAITING, call} a call that waits for an approval, or was rejected
-- USES common, operation_log, run

local run_key, ledger_key, journal_key, operations_key = unpack(KEYS)
local operation_id, age_ms, ttl_ms = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local token, revision, max_bytes = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local calls = cmsgpack.unpack(ARGV[7])
local FIRST = 8

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
  if known and known.operation == operation_id then return {DONE, known.before} end
  if known and not retry then return {UNCERTAIN, known.at} end
  local at = math.floor(now_us / 1000)
  local entry = {fingerprint = fingerprint, by = whole(token), at = at, operation = operation_id}
  entry.before = known and known.at
  redis.call('HSET', ledger_key, 'call:' .. call, cmsgpack.pack(entry))
  return {DONE, entry.before}
end

local has_replies = #ARGV >= FIRST
local now_us = clock_us()
local log = read_log(operations_key, operation_id, age_ms, now_us)
if refuse_repeat(log) then return refuse_repeat(log) end
local run = load_run(run_key)
if not run then return {MISSING} end
if run.status ~= 'running' or run.token ~= token then
  return {STALE, run.status, whole(run.token)}
end
if has_replies and run.revision ~= revision then return {CONFLICT, run.revision, run.turn} end
local bytes = has_replies and journal_bytes_with(run_key, journal_key, ARGV, FIRST) or 0
if bytes > max_bytes then return {FULL, bytes} end
for _, wanted in ipairs(calls) do
  local refused = refusal(wanted)
  if refused then return refused end
end

if has_replies then add_to_journal(run_key, journal_key, ARGV, FIRST, bytes, ttl_ms) end
local reply = {DONE, run.cancel}
for index, wanted in ipairs(calls) do reply[index + 2] = outcome(wanted, now_us) end
redis.call('PEXPIRE', ledger_key, ttl_ms)
if not log.result then write_log(operations_key, operation_id, 'started', log) end
return reply
