-- Reads a run: its header, the calls that wait, and its snapshot if it is wanted.
--
-- KEYS
--   run     hash  capsule:{S:<session>}:run:<run>
--   ledger  hash  capsule:{S:<session>}:run:<run>:ledger
-- ARGV
--   with_snapshot  1 to include the snapshot
-- RETURNS {DONE, status, revision, turn, owner, token, cancel, schema, agent, created, updated,
--         snapshot, calls that wait in MessagePack, message, result, error, unsent,
--         usage, calls that were decided since the last turn}
-- REFUSES {MISSING} a run that does not exist
-- USES common, run

local run_key, ledger_key = KEYS[1], KEYS[2]
local with_snapshot = ARGV[1] == '1'

local run = load_run(run_key)
if not run then return {MISSING} end
local stored = redis.call('HMGET', run_key, 'created', 'message', 'result', 'error', 'usage')
local requests, decided = {}, {}
for _, call in ipairs(run.pending) do
  local request = entry_of(ledger_key, 'approval:' .. call)
  if request and not decision_on(ledger_key, request) then
    requests[#requests + 1] = request
  else
    decided[#decided + 1] = call
  end
end
return {
  DONE, run.status, run.revision, run.turn, run.owner, whole(run.token), run.cancel, run.schema,
  run.agent, stored[1], whole(run.updated),
  with_snapshot and redis.call('HGET', run_key, 'snapshot') or '', cmsgpack.pack(requests),
  stored[2], stored[3] or '', stored[4] or '', run.unsent, stored[5] or '', decided,
}
