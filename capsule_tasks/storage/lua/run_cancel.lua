-- Ends a run that nobody holds, or asks its owner to end it.
--
-- KEYS
--   run      hash  capsule:{S:<session>}:run:<run>
--   ledger   hash  capsule:{S:<session>}:run:<run>:ledger
--   batches  hash  capsule:{S:<session>}:batches
-- ARGV
--   operation  id of this write
--   age_ms     since it was first sent; 0 the first time
--   ttl_ms     until the run is forgotten
--   by         who asks for it
-- RETURNS {DONE, status, owner, updated, gone}; owner is the incarnation that has to be told, gone
--         are the calls that wait no more, each with its agent and tool, in MessagePack
-- REFUSES {GIVEN_UP} an operation whose caller left before it was done
--         {FORGOTTEN} a repeat that the memory does not reach back to
--         {MISSING} a run that does not exist
--         {ENDED, status} one that is over
-- USES once, run

local run_key, ledger_key, batches_key = KEYS[1], KEYS[2], KEYS[3]
local operation, age_ms, ttl_ms, by = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4]

local now_us = clock_us()
local memory = recall(batches_key, operation, age_ms, now_us)
if barred(memory) then return barred(memory) end
if memory.result then return cmsgpack.unpack(memory.result) end
local run = load_run(run_key)
if not run then return {MISSING} end
if ENDED_STATUS[run.status] then return {ENDED, run.status} end

local gone = {}
if run.cancel == '' then run.cancel = by end
if run.status ~= 'running' then
  run.status = 'cancelled'
  for _, call in ipairs(run.pending) do
    local ask = entry_of(ledger_key, 'ask:' .. call)
    if ask then gone[#gone + 1] = {call, ask.agent, ask.tool} end
  end
end
save_run(run_key, ledger_key, run, now_us, ttl_ms)
local reply = {DONE, run.status, run.owner, whole(run.updated), cmsgpack.pack(gone)}
remember(batches_key, operation, cmsgpack.pack(reply), memory)
return reply
