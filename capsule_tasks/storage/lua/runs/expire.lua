-- Decides calls whose time limit has passed, each as its `on_expiry` says.
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
--   listed        statuses in the index of runs, with their times, in MessagePack
--   channel       of the signals
-- RETURNS {DONE, resume, status, updated, call...}; resume is 1 if the caller has to send a
--         message for the run; updated is 0 where nothing was due
-- REFUSES {ABANDONED} an operation that its caller abandoned before it was done
--         {FORGOTTEN} a repeat that is older than the operation log
--         {MISSING} a run that does not exist
--         {LATE, status} a status that is not in the index of runs, or may have been dropped
-- USES common, operation_log, two_name_index, run

local run_key, ledger_key, operations_key = KEYS[1], KEYS[2], KEYS[3]
local operation_id, age_ms, ttl_ms = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local run_id, listed, channel = ARGV[4], cmsgpack.unpack(ARGV[5]), ARGV[6]

local now_us = clock_us()
local log = read_log(operations_key, operation_id, age_ms, now_us)
if refuse_repeat(log) then return refuse_repeat(log) end
if log.result then return cmsgpack.unpack(log.result) end
local run = load_run(run_key)
if not run then return {MISSING} end

local expired = {}
for _, call in ipairs(ENDED_STATUS[run.status] and {} or run.pending) do
  local request = entry_of(ledger_key, 'approval:' .. call)
  local is_due = request and request.expires and request.expires <= math.floor(now_us / 1000)
  if is_due and not decision_on(ledger_key, request) then expired[#expired + 1] = request end
end
if #expired == 0 then return {DONE, 0, run.status, '0'} end
local late = unlisted(run, status_after(run, expired), listed, now_us)
if late then return late end

local resume, due = 0, {}
for _, request in ipairs(expired) do
  if not ENDED_STATUS[run.status] then
    resume = math.max(resume, expire(ledger_key, run, request, now_us))
    due[#due + 1] = request.call
  end
end
save_run(run_key, ledger_key, run, now_us, ttl_ms)
for _, call in ipairs(due) do announce(channel, 'decided', run_id, call, EXPIRY) end
local reply = {DONE, resume, run.status, whole(run.updated)}
for _, call in ipairs(due) do reply[#reply + 1] = call end
write_log(operations_key, operation_id, cmsgpack.pack(reply), log)
return reply
