-- Records the first decision on a call that waits, and queues the run if it is parked.
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
--   call          to decide
--   decision      {approved, message, by, output} in MessagePack
--   always        1 to decide all calls of the tool by the agent
--   roles         of the person who decides, in MessagePack
--   listed        statuses in the index of runs, with their times, in MessagePack
--   channel       of the signals
-- RETURNS {DONE, resume, status, tool, agent, updated}; resume is 1 if the caller has to send
--         a message for the run
-- REFUSES {ABANDONED} an operation that its caller abandoned before it was done
--         {FORGOTTEN} a repeat that is older than the operation log
--         {MISSING} a run that does not exist
--         {ENDED, status} a run that has ended
--         {UNKNOWN} a call that does not wait
--         {UNKNOWN, kind} an output for a call that waits for an approval
--         {STARTED} a call that was started under a standing approval
--         {DECIDED, decision in MessagePack} a call that already has a decision
--         {EXPIRED, decision in MessagePack, resume, updated} a call whose time had passed; it
--         is decided as its `on_expiry` says
--         {LATE, status} a status that is not in the index of runs, or may have been dropped
--         {DENIED, may in MessagePack} a person who may not decide
-- USES common, operation_log, two_name_index, run

local run_key, ledger_key, operations_key = KEYS[1], KEYS[2], KEYS[3]
local operation_id, age_ms, ttl_ms = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local run_id, call, decision, always = ARGV[4], ARGV[5], cmsgpack.unpack(ARGV[6]), ARGV[7] == '1'
local roles, listed, channel = cmsgpack.unpack(ARGV[8]), cmsgpack.unpack(ARGV[9]), ARGV[10]

local function may_decide(request)
  for _, role in ipairs(roles) do
    for _, allowed in ipairs(request.may or {}) do
      if role == allowed then return true end
    end
  end
  return not request.may
end

local now_us = clock_us()
local log = read_log(operations_key, operation_id, age_ms, now_us)
if refuse_repeat(log) then return refuse_repeat(log) end
if log.result then return cmsgpack.unpack(log.result) end
local run = load_run(run_key)
if not run then return {MISSING} end
local known = redis.call('HGET', ledger_key, 'decision:' .. call)
if known then return {DECIDED, known} end
if ENDED_STATUS[run.status] then return {ENDED, run.status} end
local request = entry_of(ledger_key, 'approval:' .. call)
if not request then return {UNKNOWN} end
if decision.output and request.kind ~= 'settle' then return {UNKNOWN, request.kind or ''} end
if redis.call('HEXISTS', ledger_key, 'call:' .. call) == 1 then return {STARTED} end

local is_expired = request.expires and request.expires <= math.floor(now_us / 1000)
if not is_expired and not may_decide(request) then return {DENIED, cmsgpack.pack(request.may)} end
local after = run.status == 'interrupted' and 'queued' or run.status
if is_expired then after = status_after(run, {request}) end
local late = unlisted(run, after, listed, now_us)
if late then return late end

local resume
if is_expired then
  resume = expire(ledger_key, run, request, now_us)
else
  decide(ledger_key, request, decision, always, now_us)
  resume = wake(run)
end
save_run(run_key, ledger_key, run, now_us, ttl_ms)
announce(channel, 'decided', run_id, call, is_expired and EXPIRY or decision.by or '')
local reply = {DONE, resume, run.status, request.tool, request.agent, whole(run.updated)}
if is_expired then
  local taken = redis.call('HGET', ledger_key, 'decision:' .. call)
  reply = {EXPIRED, taken, resume, whole(run.updated)}
end
write_log(operations_key, operation_id, cmsgpack.pack(reply), log)
return reply
