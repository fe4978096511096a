-- Queues a run again as it was last committed, for another worker.
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
--   is_lost       1 if the owner is gone, 0 if it asks for this itself
--   listed        statuses in the index of runs, with their times, in MessagePack
-- RETURNS {DONE, status, updated}
-- REFUSES {ABANDONED} an operation that its caller abandoned before it was done
--         {FORGOTTEN} a repeat that is older than the operation log
--         {MISSING} a run that does not exist
--         {STALE, status, token} a claim that is over
--         {LATE, status} a status that is not in the index of runs, or may have been dropped
-- USES common, operation_log, two_name_index, run

local run_key, ledger_key, journal_key, operations_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local operation_id, age_ms, ttl_ms = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local token, is_lost, listed = tonumber(ARGV[4]), ARGV[5] == '1', cmsgpack.unpack(ARGV[6])

local now_us = clock_us()
local log = read_log(operations_key, operation_id, age_ms, now_us)
if refuse_repeat(log) then return refuse_repeat(log) end
if log.result then return cmsgpack.unpack(log.result) end
local run = load_run(run_key)
if not run then return {MISSING} end
if run.status ~= 'running' or run.token ~= token then
  return {STALE, run.status, whole(run.token)}
end
local status = run.cancel ~= '' and 'cancelled' or 'queued'
local late = unlisted(run, status, listed, now_us)
if late then return late end

if is_lost then count_loss(run_key, ledger_key, journal_key, run) end
run.status, run.needs_message = status, true
save_run(run_key, ledger_key, run, now_us, ttl_ms)
local reply = {DONE, run.status, whole(run.updated)}
write_log(operations_key, operation_id, cmsgpack.pack(reply), log)
return reply
