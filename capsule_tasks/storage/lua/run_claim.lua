-- Gives a run to one owner, with its snapshot and the decisions that were taken meanwhile.
--
-- KEYS
--   run      hash  capsule:{S:<session>}:run:<run>
--   ledger   hash  capsule:{S:<session>}:run:<run>:ledger
--   batches  hash  capsule:{S:<session>}:batches
-- ARGV
--   operation    id of this write
--   age_ms       since it was first sent; 0 the first time
--   ttl_ms       until the run is forgotten
--   incarnation  of the worker that wants it
--   steal        token of the owner whose lease has lapsed; 0 takes it from nobody
--   readable     schema versions that the worker reads, in MessagePack; empty for all
-- RETURNS {DONE, token, revision, turn, cancel, schema, agent, snapshot, decisions in MessagePack,
--         updated}
-- REFUSES {GIVEN_UP} an operation whose caller left before it was done
--         {FORGOTTEN} a repeat that the memory does not reach back to
--         {MISSING} a run that does not exist
--         {ENDED, status} one that is over
--         {WAITING, calls} one that waits for a decision
--         {HELD, incarnation, token} one that has an owner
--         {UNREADABLE, schema} one that this worker cannot read; it stays as it is
-- USES once, run

local run_key, ledger_key, batches_key = KEYS[1], KEYS[2], KEYS[3]
local operation, age_ms, ttl_ms = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local incarnation, steal, readable = ARGV[4], tonumber(ARGV[5]), cmsgpack.unpack(ARGV[6])

local function reads(schema)
  for _, version in ipairs(readable) do
    if version == schema then return true end
  end
  return #readable == 0
end

local function granted(run)
  local decisions = {}
  for _, call in ipairs(run.pending) do
    decisions[#decisions + 1] = entry_of(ledger_key, 'dec:' .. call)
  end
  local all = {exact = decisions, standing = entry_of(ledger_key, 'standing') or {}}
  return {
    DONE, whole(run.token), run.revision, run.turn, run.cancel, run.schema, run.agent,
    redis.call('HGET', run_key, 'snapshot'), cmsgpack.pack(all), whole(run.updated),
  }
end

local now_us = clock_us()
local memory = recall(batches_key, operation, age_ms, now_us)
if barred(memory) then return barred(memory) end
local run = load_run(run_key)
if not run then return {MISSING} end
if memory.result then
  if memory.result == whole(run.token) and run.status == 'running' then return granted(run) end
  return {HELD, run.owner, whole(run.token)}
end

if ENDED_STATUS[run.status] then return {ENDED, run.status} end
if run.status == 'interrupted' then return {WAITING, #run.pending} end
if run.status == 'running' and run.token ~= steal then
  return {HELD, run.owner, whole(run.token)}
end
if not reads(run.schema) then return {UNREADABLE, run.schema} end

run.status, run.owner, run.token = 'running', incarnation, math.max(run.token + 1, now_us)
save_run(run_key, ledger_key, run, now_us, ttl_ms)
remember(batches_key, operation, whole(run.token), memory)
return granted(run)
