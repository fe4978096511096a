-- Hands a run back as it was last committed, for another worker.
--
-- KEYS
--   run      hash  capsule:{S:<session>}:run:<run>
--   ledger   hash  capsule:{S:<session>}:run:<run>:ledger
--   batches  hash  capsule:{S:<session>}:batches
-- ARGV
--   operation  id of this write
--   age_ms     since it was first sent; 0 the first time
--   ttl_ms     until the run is forgotten
--   token      of the owner's claim
-- RETURNS {DONE, status, updated}
-- REFUSES {GIVEN_UP} an operation whose caller left before it was done
--         {FORGOTTEN} a repeat that the memory does not reach back to
--         {MISSING} a run that does not exist
--         {STALE, status, token} a claim that is over
-- USES once, run

local run_key, ledger_key, batches_key = KEYS[1], KEYS[2], KEYS[3]
local operation, age_ms, ttl_ms, token = ARGV[1], tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4])

local now_us = clock_us()
local memory = recall(batches_key, operation, age_ms, now_us)
if barred(memory) then return barred(memory) end
if memory.result then return cmsgpack.unpack(memory.result) end
local run = load_run(run_key)
if not run then return {MISSING} end
if run.status ~= 'running' or run.token ~= token then
  return {STALE, run.status, whole(run.token)}
end

run.status = run.cancel ~= '' and 'cancelled' or 'queued'
save_run(run_key, ledger_key, run, now_us, ttl_ms)
local reply = {DONE, run.status, whole(run.updated)}
remember(batches_key, operation, cmsgpack.pack(reply), memory)
return reply
