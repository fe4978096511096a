-- Records a decision on a call that waits; the first one counts, and wakes a parked run.
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
--   call       that is decided about
--   decision   {approved, message, by} in MessagePack
--   always     1 if it holds for all calls of the tool by the agent
--   roles      of whoever decides, in MessagePack
--   channel    where it is announced
-- RETURNS {DONE, resume, status, tool, agent, updated}; resume is 1 for the one who has to send
--         the run on
-- REFUSES {GIVEN_UP} an operation whose caller left before it was done
--         {FORGOTTEN} a repeat that the memory does not reach back to
--         {MISSING} a run that does not exist
--         {ENDED, status} one that is over
--         {UNKNOWN} a call that does not wait
--         {STARTED} a call that was made already, under a standing approval
--         {DECIDED, decision in MessagePack} a call that was decided about before
--         {EXPIRED, decision in MessagePack, resume, updated} one whose time had passed; what it
--         said for that case is done now
--         {DENIED, may in MessagePack} somebody who may not decide
-- USES once, run

local run_key, ledger_key, batches_key = KEYS[1], KEYS[2], KEYS[3]
local operation, age_ms, ttl_ms = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local run_id, call, decision, always = ARGV[4], ARGV[5], cmsgpack.unpack(ARGV[6]), ARGV[7] == '1'
local roles, channel = cmsgpack.unpack(ARGV[8]), ARGV[9]

local function may_decide(ask)
  for _, role in ipairs(roles) do
    for _, allowed in ipairs(ask.may or {}) do
      if role == allowed then return true end
    end
  end
  return not ask.may
end

local now_us = clock_us()
local memory = recall(batches_key, operation, age_ms, now_us)
if barred(memory) then return barred(memory) end
if memory.result then return cmsgpack.unpack(memory.result) end
local run = load_run(run_key)
if not run then return {MISSING} end
local known = redis.call('HGET', ledger_key, 'dec:' .. call)
if known then return {DECIDED, known} end
if ENDED_STATUS[run.status] then return {ENDED, run.status} end
local ask = entry_of(ledger_key, 'ask:' .. call)
if not ask then return {UNKNOWN} end
if redis.call('HEXISTS', ledger_key, 'call:' .. call) == 1 then return {STARTED} end

local is_expired = ask.expires and ask.expires <= math.floor(now_us / 1000)
if not is_expired and not may_decide(ask) then return {DENIED, cmsgpack.pack(ask.may)} end

local resume
if is_expired then
  resume = expire(ledger_key, run, ask, now_us)
else
  decide(ledger_key, ask, decision, always, now_us)
  resume = wake(run)
end
save_run(run_key, ledger_key, run, now_us, ttl_ms)
announce(channel, 'decided', run_id, call, is_expired and EXPIRY or decision.by or '')
local reply = {DONE, resume, run.status, ask.tool, ask.agent, whole(run.updated)}
if is_expired then
  local taken = redis.call('HGET', ledger_key, 'dec:' .. call)
  reply = {EXPIRED, taken, resume, whole(run.updated)}
end
remember(batches_key, operation, cmsgpack.pack(reply), memory)
return reply
