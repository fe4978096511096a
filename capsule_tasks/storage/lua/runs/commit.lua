-- Commits one turn of a run: the items for its history and the new snapshot, or neither.
--
-- KEYS
--   run         hash  capsule:{S:<session>}:run:<run>
--   ledger      hash  capsule:{S:<session>}:run:<run>:ledger
--   journal     hash  capsule:{S:<session>}:run:<run>:journal
--   items       list  capsule:{S:<session>}:items
--   history     hash  capsule:{S:<session>}:history
--   operations  hash  capsule:{S:<session>}:operations
-- ARGV
--   operation_id    id of this write
--   age_ms          since the operation was first sent; 0 the first time
--   ttl_ms          until the run expires
--   run_id          for the signals
--   token           of the owner's claim
--   revision        that the owner has read
--   turn            turns that are complete
--   status          running, queued, interrupted, completed, failed or cancelled
--   schema          of the snapshot
--   agent           of the next turn
--   snapshot        opaque
--   result          of a run that ends, opaque
--   error           of a run that ends, opaque
--   usage           of the run in all its turns, opaque
--   requests        all calls that wait for an approval, in MessagePack
--   indexed_ms      when they were indexed, by the clock of the index
--   listed          statuses in the index of runs, with their times, in MessagePack
--   channel         of the signals
--   history_ttl_ms  until the history expires
--   max_items       of the history at most
--   max_bytes       of all its items together at most
--   record...       items for the history, in order
-- RETURNS {DONE, revision, status, cancel, updated}; status is cancelled or queued in place of
--         interrupted if a cancel or a decision came first
-- REFUSES {ABANDONED} an operation that its caller abandoned before it was done
--         {FORGOTTEN} a repeat that is older than the operation log
--         {MISSING} a run that does not exist
--         {STALE, status, token} a claim that is over
--         {CONFLICT, revision, turn} another revision, or a turn before the last
--         {LATE} calls whose index entries may have been dropped
--         {LATE, status} a status that is not in the index of runs, or may have been dropped
--         {CHANGED, call} a call that is known with another fingerprint
--         {FULL, length, bytes} items that do not fit
-- USES common, operation_log, history, two_name_index, run, approvals

local run_key, ledger_key, journal_key, items_key, history_key, operations_key = unpack(KEYS)
local operation_id, age_ms, ttl_ms = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local run_id, token = ARGV[4], tonumber(ARGV[5])
local revision, turn = tonumber(ARGV[6]), tonumber(ARGV[7])
local status, schema, agent, snapshot = ARGV[8], ARGV[9], ARGV[10], ARGV[11]
local result, error, usage = ARGV[12], ARGV[13], ARGV[14]
local requests, indexed_ms = cmsgpack.unpack(ARGV[15]), tonumber(ARGV[16])
local listed, channel = cmsgpack.unpack(ARGV[17]), ARGV[18]
local history_ttl_ms, max_items, max_bytes = ARGV[19], tonumber(ARGV[20]), tonumber(ARGV[21])
local FIRST = 22

-- A decision or a cancel that came first counts.
local function status_after_commit(run)
  local after = status
  for _, request in ipairs(status == 'interrupted' and requests or {}) do
    if decision_on(ledger_key, request) then after = 'queued' end
  end
  local is_handed_back = after == 'interrupted' or after == 'queued'
  return run.cancel ~= '' and is_handed_back and 'cancelled' or after
end

local function committed(run)
  return {DONE, run.revision, run.status, run.cancel, whole(run.updated)}
end

local now_us = clock_us()
local log = read_log(operations_key, operation_id, age_ms, now_us)
if refuse_repeat(log) then return refuse_repeat(log) end
if log.result then return cmsgpack.unpack(log.result) end
local run = load_run(run_key)
if not run then return {MISSING} end
-- The same turn under another operation: the owner got no reply to the first commit. The status of
-- a run that was handed back may have changed since, by a decision or a cancel.
local is_handed_back = status == 'interrupted' or status == 'queued'
local is_repeat = run.token == token and run.revision == revision + 1 and run.turn == turn
  and (run.status == status or is_handed_back and run.status ~= 'running')
if is_repeat and redis.call('HGET', run_key, 'snapshot') == snapshot then
  return committed(note_listed(run, listed, run_key))
end
if run.token ~= token or run.status ~= 'running' then
  return {STALE, run.status, whole(run.token)}
end
if run.revision ~= revision or turn < run.turn then return {CONFLICT, run.revision, run.turn} end
if is_late(requests, indexed_ms, now_us) then return {LATE} end
local changed = changed_call(ledger_key, requests)
if changed then return {CHANGED, changed} end
local after = status_after_commit(run)
local late = unlisted(run, after, listed, now_us)
if late then return late end
local state = load_history(history_key, items_key)
local count, bytes = #ARGV - FIRST + 1, size_of(ARGV, FIRST)
if count > 0 and (state.length + count > max_items or state.bytes + bytes > max_bytes) then
  return {FULL, state.length, state.bytes}
end

if count > 0 then
  push(items_key, ARGV, FIRST)
  state.bytes = state.bytes + bytes
  save_history(history_key, items_key, state, now_us, history_ttl_ms, false)
end
local is_turn_over = note_waited(run_key, run, turn > run.turn or ENDED_STATUS[status])
run.revision, run.turn, run.status = revision + 1, turn, after
run.schema, run.agent, run.needs_message = schema, agent, after == 'queued'
request_approvals(ledger_key, run, requests, now_us)
redis.call('HSET', run_key, 'snapshot', snapshot, 'usage', usage)
-- A run that is parked inside its turn goes on with the replies that its models gave.
if is_turn_over then
  redis.call('HDEL', run_key, 'journal_bytes')
  redis.call('DEL', journal_key)
end
if ENDED_STATUS[run.status] then redis.call('HSET', run_key, 'result', result, 'error', error) end
save_run(run_key, ledger_key, run, now_us, ttl_ms)
if not ENDED_STATUS[run.status] then announce_requests(channel, run_id, requests) end
write_log(operations_key, operation_id, cmsgpack.pack(committed(run)), log)
return committed(run)
