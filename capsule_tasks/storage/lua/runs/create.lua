-- Stores a new run: queued, or parked if it comes with calls that wait.
--
-- KEYS
--   run         hash  capsule:{S:<session>}:run:<run>
--   ledger      hash  capsule:{S:<session>}:run:<run>:ledger
--   operations  hash  capsule:{S:<session>}:operations
-- ARGV
--   operation_id  id of this write
--   age_ms        since the operation was first sent; 0 the first time
--   ttl_ms        until the run expires
--   run_id        for the signals
--   schema        of the snapshot
--   agent         of the next turn
--   snapshot      opaque
--   message       that brings the run to a worker, opaque
--   requests      calls that wait for an approval, in MessagePack
--   indexed_ms    when they were indexed, by the clock of the index
--   listed        statuses in the index of runs, with their times, in MessagePack
--   channel       of the signals
-- RETURNS {DONE, updated, status}
-- REFUSES {ABANDONED} an operation that its caller abandoned before it was done
--         {FORGOTTEN} a repeat that is older than the operation log
--         {CONFLICT, status} a run that exists already
--         {LATE} calls whose index entries may have been dropped
--         {LATE, status} a status that is not in the index of runs, or may have been dropped
-- USES common, operation_log, two_name_index, run, approvals

local run_key, ledger_key, operations_key = KEYS[1], KEYS[2], KEYS[3]
local operation_id, age_ms, ttl_ms = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local run_id, schema, agent, snapshot, message = ARGV[4], ARGV[5], ARGV[6], ARGV[7], ARGV[8]
local requests, indexed_ms = cmsgpack.unpack(ARGV[9]), tonumber(ARGV[10])
local listed, channel = cmsgpack.unpack(ARGV[11]), ARGV[12]

local now_us = clock_us()
local log = read_log(operations_key, operation_id, age_ms, now_us)
if refuse_repeat(log) then return refuse_repeat(log) end
if log.result then return cmsgpack.unpack(log.result) end

local known = redis.call('HGET', run_key, 'status')
if known then return {CONFLICT, known} end
if is_late(requests, indexed_ms, now_us) then return {LATE} end

local status = #requests > 0 and 'interrupted' or 'queued'
local late = unlisted({}, status, listed, now_us)
if late then return late end

local run = {
  status = status, unsent = '', needs_message = status == 'queued',
  revision = 1, turn = 0, owner = '', token = 0,
  cancel = '', pending = {}, updated = 0, schema = schema, agent = agent,
}
request_approvals(ledger_key, run, requests, now_us)
redis.call('HSET', run_key, 'created', whole(now_us), 'snapshot', snapshot, 'message', message)
save_run(run_key, ledger_key, run, now_us, ttl_ms)
announce_requests(channel, run_id, requests)
local reply = {DONE, whole(run.updated), run.status}
write_log(operations_key, operation_id, cmsgpack.pack(reply), log)
return reply
