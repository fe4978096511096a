-- Cancels a run without an owner, or records the cancel for its owner.
--
-- KEYS
--   run         hash  capsule:{S:<session>}:run:<run>
--   ledger      hash  capsule:{S:<session>}:run:<run>:ledger
--   operations  hash  capsule:{S:<session>}:operations
-- ARGV
--   operation_id  id of this write
--   age_ms        since the operation was first sent; 0 the first time
--   ttl_ms        until the run expires
--   by            who requests it
--   listed        statuses in the index of runs, with their times, in MessagePack
-- RETURNS {DONE, status, owner, updated, dropped}; owner is the incarnation to notify, dropped are
--         calls that wait no more, each with its agent and tool, in MessagePack
-- REFUSES {ABANDONED} an operation that its caller abandoned before it was done
--         {FORGOTTEN} a repeat that is older than the operation log
--         {MISSING} a run that does not exist
--         {ENDED, status} a run that has ended
--         {LATE, status} a status that is not in the index of runs, or may have been dropped
-- USES common, operation_log, two_name_index, run

local run_key, ledger_key, operations_key = KEYS[1], KEYS[2], KEYS[3]
local operation_id, age_ms, ttl_ms, by = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4]
local listed = cmsgpack.unpack(ARGV[5])

local now_us = clock_us()
local log = read_log(operations_key, operation_id, age_ms, now_us)
if refuse_repeat(log) then return refuse_repeat(log) end
if log.result then return cmsgpack.unpack(log.result) end
local run = load_run(run_key)
if not run then return {MISSING} end
if ENDED_STATUS[run.status] then return {ENDED, run.status} end
local late = run.status ~= 'running' and unlisted(run, 'cancelled', listed, now_us)
if late then return late end

local dropped = {}
note_listed(run, listed)
if run.cancel == '' then run.cancel = by end
if run.status ~= 'running' then
  cancel_unowned(run)
  dropped = waiting_calls(ledger_key, run)
end
save_run(run_key, ledger_key, run, now_us, ttl_ms)
local reply = {DONE, run.status, run.owner, whole(run.updated), cmsgpack.pack(dropped)}
write_log(operations_key, operation_id, cmsgpack.pack(reply), log)
return reply
