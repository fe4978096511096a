-- Decides what was asked for with a time limit that has passed, each call as it said.
--
-- KEYS
--   run      hash  capsule:{S:<session>}:run:<run>
--   ledger   hash  capsule:{S:<session>}:run:<run>:ledger
--   batches  hash  capsule:{S:<session>}:batches
-- ARGV
--   operation  id of this write
--   age_ms     since it was first sent; 0 the first time
--   ttl_ms     until the run is forgotten
--   run_id     for announcements
--   channel    where it is announced
-- RETURNS {DONE, resume, status, updated, call...}; resume is 1 for the one who has to send the
--         run on; updated is 0 where nothing was due
-- REFUSES {GIVEN_UP} an operation whose caller left before it was done
--         {FORGOTTEN} a repeat that the memory does not reach back to
--         {MISSING} a run that does not exist
-- USES once, run

local run_key, ledger_key, batches_key = KEYS[1], KEYS[2], KEYS[3]
local operation, age_ms, ttl_ms = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local run_id, channel = ARGV[4], ARGV[5]

local now_us = clock_us()
local memory = recall(batches_key, operation, age_ms, now_us)
if barred(memory) then return barred(memory) end
if memory.result then return cmsgpack.unpack(memory.result) end
local run = load_run(run_key)
if not run then return {MISSING} end

local resume, due = 0, {}
for _, call in ipairs(run.pending) do
  local ask = entry_of(ledger_key, 'ask:' .. call)
  local is_due = ask and ask.expires and ask.expires <= math.floor(now_us / 1000)
  if is_due and not decision_on(ledger_key, ask) and not ENDED_STATUS[run.status] then
    resume = math.max(resume, expire(ledger_key, run, ask, now_us))
    due[#due + 1] = call
  end
end
if #due == 0 then return {DONE, 0, run.status, '0'} end
if ENDED_STATUS[run.status] then resume = 0 end
save_run(run_key, ledger_key, run, now_us, ttl_ms)
for _, call in ipairs(due) do announce(channel, 'decided', run_id, call, EXPIRY) end
local reply = {DONE, resume, run.status, whole(run.updated)}
for _, call in ipairs(due) do reply[#reply + 1] = call end
remember(batches_key, operation, cmsgpack.pack(reply), memory)
return reply
