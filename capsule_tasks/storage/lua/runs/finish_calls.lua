-- Records outputs of tool calls. The owner that started a call may do so, also after losing the
-- run: the call happened, and the next owner needs to know. So may the present owner, which has
-- found out what became of a call that another owner started.
--
-- KEYS
--   run         hash  capsule:{S:<session>}:run:<run>
--   ledger      hash  capsule:{S:<session>}:run:<run>:ledger
--   operations  hash  capsule:{S:<session>}:operations
-- ARGV
--   operation_id  id of this write
--   age_ms        since the operation was first sent; 0 the first time
--   token         of the claim under which the calls were started, or of the present owner's
--   part...       call, output, call, output, and so on
-- RETURNS {DONE}
-- REFUSES {ABANDONED} an operation that its caller abandoned before it was done
--         {FORGOTTEN} a repeat that is older than the operation log
--         {MISSING} a run that does not exist
--         {UNKNOWN, call} a call that was never started
--         {STALE, status, token} a claim that is over and has not started one of the calls
--         {FINISHED, call} a call that has another output
-- USES common, operation_log, run

local run_key, ledger_key, operations_key = KEYS[1], KEYS[2], KEYS[3]
local operation_id, age_ms, token = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local FIRST = 4

local log = read_log(operations_key, operation_id, age_ms, clock_us())
if refuse_repeat(log) then return refuse_repeat(log) end
if log.result then return {DONE} end
local run = load_run(run_key)
if not run then return {MISSING} end
local is_owner = run.status == 'running' and whole(run.token) == token
for index = FIRST, #ARGV, 2 do
  local known = entry_of(ledger_key, 'call:' .. ARGV[index])
  if not known then return {UNKNOWN, ARGV[index]} end
  local output = redis.call('HGET', ledger_key, 'output:' .. ARGV[index])
  if output and output ~= ARGV[index + 1] then return {FINISHED, ARGV[index]} end
  if not output and known.by ~= token and not is_owner then
    return {STALE, run.status, whole(run.token)}
  end
end

for index = FIRST, #ARGV, 2 do
  redis.call('HSET', ledger_key, 'output:' .. ARGV[index], ARGV[index + 1])
end
write_log(operations_key, operation_id, 'finished', log)
return {DONE}
