-- Claims a run for one owner, who gets its snapshot and the decisions taken since.
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
--   incarnation   of the worker that claims it
--   steal         token of an owner whose lease has lapsed, or 0
--   readable      schema versions that the worker can read, in MessagePack; empty for all
--   listed        statuses in the index of runs, with their times, in MessagePack
--   message       that brings the run to a worker from now on; empty to keep the stored one
--   held_ms       when the worker has recorded that it holds the run, by Redis's clock
-- RETURNS {DONE, token, revision, turn, cancel, schema, agent, snapshot, decisions in MessagePack,
--         updated, message, replies of models: [key, reply, …], lost owners since its progress, usage}
-- REFUSES {ABANDONED} an operation that its caller abandoned before it was done
--         {FORGOTTEN} a repeat that is older than the operation log
--         {MISSING} a run that does not exist
--         {ENDED, status, result, error} a run that has ended
--         {WAITING, calls} a run that waits for a decision
--         {HELD, incarnation, token} a run that has an owner
--         {LOST} a worker whose record of the run may have been dropped
--         {LATE, status} a status that is not in the index of runs, or may have been dropped
--         {UNREADABLE, schema} a run that this worker cannot read; it stays as it is
-- USES common, operation_log, two_name_index, run

local run_key, ledger_key, journal_key, operations_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local operation_id, age_ms, ttl_ms = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local incarnation, steal, readable = ARGV[4], tonumber(ARGV[5]), cmsgpack.unpack(ARGV[6])
local listed, message, held_ms = cmsgpack.unpack(ARGV[7]), ARGV[8], tonumber(ARGV[9])

local function reads(schema)
  for _, version in ipairs(readable) do
    if version == schema then return true end
  end
  return #readable == 0
end

local function granted(run)
  local decisions = {}
  for _, call in ipairs(calls_of_turn(run_key, run)) do
    decisions[#decisions + 1] = entry_of(ledger_key, 'decision:' .. call)
  end
  local stored = redis.call('HMGET', run_key, 'snapshot', 'message', 'losses', 'usage')
  local all = {exact = decisions, standing = entry_of(ledger_key, 'standing') or {}}
  return {
    DONE, whole(run.token), run.revision, run.turn, run.cancel, run.schema, run.agent,
    stored[1], cmsgpack.pack(all), whole(run.updated), stored[2],
    redis.call('HGETALL', journal_key), tonumber(stored[3] or 0), stored[4] or '',
  }
end

local now_us = clock_us()
local log = read_log(operations_key, operation_id, age_ms, now_us)
if refuse_repeat(log) then return refuse_repeat(log) end
local run = load_run(run_key)
if not run then return {MISSING} end
if log.result then
  if log.result == whole(run.token) and run.status == 'running' then return granted(run) end
  return {HELD, run.owner, whole(run.token)}
end

if ENDED_STATUS[run.status] then
  local ended = redis.call('HMGET', run_key, 'result', 'error')
  return {ENDED, run.status, ended[1] or '', ended[2] or ''}
end
if run.status == 'interrupted' then return {WAITING, #run.pending} end
if run.status == 'running' and run.token ~= steal then
  return {HELD, run.owner, whole(run.token)}
end
if not reads(run.schema) then return {UNREADABLE, run.schema} end
if is_outdated(held_ms, now_us) then return {LOST} end
local late = unlisted(run, 'running', listed, now_us)
if late then return late end

if run.status == 'running' then count_loss(run_key, ledger_key, journal_key, run) end
run.status, run.unsent = 'running', ''
run.owner, run.token = incarnation, math.max(run.token + 1, now_us)
if message ~= '' then redis.call('HSET', run_key, 'message', message) end
save_run(run_key, ledger_key, run, now_us, ttl_ms)
write_log(operations_key, operation_id, whole(run.token), log)
return granted(run)
