-- Commits one turn of a run: the items for its history and the new snapshot, or neither.
--
-- KEYS
--   run      hash  capsule:{S:<session>}:run:<run>
--   ledger   hash  capsule:{S:<session>}:run:<run>:ledger
--   items    list  capsule:{S:<session>}:items
--   history  hash  capsule:{S:<session>}:history
--   batches  hash  capsule:{S:<session>}:batches
-- ARGV
--   operation       id of this write
--   age_ms          since it was first sent; 0 the first time
--   ttl_ms          until the run is forgotten
--   run_id          for announcements
--   token           of the owner's claim
--   revision        that the owner has seen
--   turn            turns that are complete
--   status          running, queued, interrupted, completed, failed or cancelled
--   schema          of the snapshot
--   agent           who speaks next
--   snapshot        opaque
--   asks            all calls that wait for a decision, in MessagePack
--   indexed_ms      when they were put into the index, by its clock
--   channel         where they are announced
--   history_ttl_ms  until the history expires
--   max_items       that the history may hold
--   max_bytes       that its items may have together
--   record...       items for the history, in order
-- RETURNS {DONE, revision, status, cancel, updated}; status may be cancelled or queued where
--         interrupted was asked for, as a cancel or a decision was there before
-- REFUSES {GIVEN_UP} an operation whose caller left before it was done
--         {FORGOTTEN} a repeat that the memory does not reach back to
--         {MISSING} a run that does not exist
--         {STALE, status, token} a claim that is over
--         {CONFLICT, revision, turn} another revision, or a turn before the last
--         {LATE} calls whose place in the index may be gone
--         {CHANGED, call} a call that is asked for again as another call
--         {FULL, length, bytes} items that do not fit
-- USES once, history, run, asks

local run_key, ledger_key, items_key, history_key, batches_key = unpack(KEYS)
local operation, age_ms, ttl_ms = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local run_id, token, revision, turn = ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local status, schema, agent, snapshot = ARGV[8], ARGV[9], ARGV[10], ARGV[11]
local asks, indexed_ms, channel = cmsgpack.unpack(ARGV[12]), tonumber(ARGV[13]), ARGV[14]
local history_ttl_ms, max_items, max_bytes = ARGV[15], tonumber(ARGV[16]), tonumber(ARGV[17])
local FIRST = 18

local function committed(run)
  return {DONE, run.revision, run.status, run.cancel, whole(run.updated)}
end

local now_us = clock_us()
local memory = recall(batches_key, operation, age_ms, now_us)
if barred(memory) then return barred(memory) end
if memory.result then return cmsgpack.unpack(memory.result) end
local run = load_run(run_key)
if not run then return {MISSING} end
-- The same turn once more, by another call: its owner was told nothing of the first. A run that was
-- handed back may have become another since, by a decision or a cancel.
local is_handed_back = status == 'interrupted' or status == 'queued'
local is_repeat = run.token == token and run.revision == revision + 1 and run.turn == turn
  and (run.status == status or is_handed_back and run.status ~= 'running')
if is_repeat and redis.call('HGET', run_key, 'snapshot') == snapshot then
  return committed(run)
end
if run.token ~= token or run.status ~= 'running' then
  return {STALE, run.status, whole(run.token)}
end
if run.revision ~= revision or turn < run.turn then return {CONFLICT, run.revision, run.turn} end
if is_late(asks, indexed_ms, now_us) then return {LATE} end
local changed = changed_call(ledger_key, asks)
if changed then return {CHANGED, changed} end
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
run.revision, run.turn, run.status, run.schema, run.agent = revision + 1, turn, status, schema, agent
ask_for(ledger_key, run, asks, now_us)
if status == 'interrupted' then
  for _, ask in ipairs(asks) do
    if decision_on(ledger_key, ask) then run.status = 'queued' end
  end
end
if run.cancel ~= '' and (status == 'interrupted' or status == 'queued') then
  run.status = 'cancelled'
end
redis.call('HSET', run_key, 'snapshot', snapshot)
save_run(run_key, ledger_key, run, now_us, ttl_ms)
if not ENDED_STATUS[run.status] then announce_asks(channel, run_id, asks) end
remember(batches_key, operation, cmsgpack.pack(committed(run)), memory)
return committed(run)
