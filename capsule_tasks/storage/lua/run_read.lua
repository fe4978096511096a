-- Tells what a run is: its header, what it waits for, and its snapshot if that is wanted.
--
-- KEYS
--   run     hash  capsule:{S:<session>}:run:<run>
--   ledger  hash  capsule:{S:<session>}:run:<run>:ledger
-- ARGV
--   with_snapshot  1 to have it
-- RETURNS {DONE, status, revision, turn, owner, token, cancel, schema, agent, created, updated,
--         snapshot, asks in MessagePack}
-- REFUSES {MISSING} a run that does not exist
-- USES once, run

local run_key, ledger_key = KEYS[1], KEYS[2]
local with_snapshot = ARGV[1] == '1'

local run = load_run(run_key)
if not run then return {MISSING} end
local asks = {}
for _, call in ipairs(run.pending) do
  local ask = entry_of(ledger_key, 'ask:' .. call)
  if ask and not decision_on(ledger_key, ask) then asks[#asks + 1] = ask end
end
return {
  DONE, run.status, run.revision, run.turn, run.owner, whole(run.token), run.cancel, run.schema,
  run.agent, redis.call('HGET', run_key, 'created'), whole(run.updated),
  with_snapshot and redis.call('HGET', run_key, 'snapshot') or '', cmsgpack.pack(asks),
}
