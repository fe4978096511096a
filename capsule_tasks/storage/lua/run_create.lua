-- Writes the record of a new run, which is queued or, when it comes with calls that wait, parked.
--
-- KEYS
--   run      hash  capsule:{S:<session>}:run:<run>
--   ledger   hash  capsule:{S:<session>}:run:<run>:ledger
--   batches  hash  capsule:{S:<session>}:batches
-- ARGV
--   operation   id of this write
--   age_ms      since it was first sent; 0 the first time
--   ttl_ms      until the run is forgotten
--   run_id      for announcements
--   schema      of the snapshot
--   agent       who speaks next
--   snapshot    opaque
--   asks        calls that wait for a decision, in MessagePack
--   indexed_ms  when they were put into the index, by its clock
--   channel     where they are announced
-- RETURNS {DONE, updated, status}
-- REFUSES {GIVEN_UP} an operation whose caller left before it was done
--         {FORGOTTEN} a repeat that the memory does not reach back to
--         {CONFLICT, status} a run that there is already
--         {LATE} calls whose place in the index may be gone
-- USES once, run, asks

local run_key, ledger_key, batches_key = KEYS[1], KEYS[2], KEYS[3]
local operation, age_ms, ttl_ms = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local run_id, schema, agent, snapshot = ARGV[4], ARGV[5], ARGV[6], ARGV[7]
local asks, indexed_ms, channel = cmsgpack.unpack(ARGV[8]), tonumber(ARGV[9]), ARGV[10]

local now_us = clock_us()
local memory = recall(batches_key, operation, age_ms, now_us)
if barred(memory) then return barred(memory) end
if memory.result then return cmsgpack.unpack(memory.result) end

local known = redis.call('HGET', run_key, 'status')
if known then return {CONFLICT, known} end
if is_late(asks, indexed_ms, now_us) then return {LATE} end

local run = {
  status = #asks > 0 and 'interrupted' or 'queued', revision = 1, turn = 0, owner = '', token = 0,
  cancel = '', pending = {}, updated = 0, schema = schema, agent = agent,
}
ask_for(ledger_key, run, asks, now_us)
redis.call('HSET', run_key, 'created', whole(now_us), 'snapshot', snapshot)
save_run(run_key, ledger_key, run, now_us, ttl_ms)
announce_asks(channel, run_id, asks)
local reply = {DONE, whole(run.updated), run.status}
remember(batches_key, operation, cmsgpack.pack(reply), memory)
return reply
