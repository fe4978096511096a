-- Shared by the scripts of runs: load and save the record, read the ledger, decide.
--
-- The record is a hash: `status`, `revision`, `turn`, `schema`, `agent`, `snapshot`, `owner` (an
-- incarnation, while it runs), `token` (of the latest claim), `cancel` (who requested it),
-- `pending` (MessagePack: ids of calls that wait), `created` and `updated` (microseconds of
-- Redis's clock; no two changes have the same `updated`), `message` (that brings the run to a
-- worker), `unsent` (`updated` when somebody became obliged to send that message, until it is known
-- to be sent, or a worker claims the run), `listed` (when the latest change was added to the index
-- of runs: what was added before may have been dropped), `journal_bytes` (of the journal), `losses`
-- (owners that were lost since the run last made progress), `lost_at` (how far it had come when the
-- last one was lost), `usage` (of all turns), `waited` (MessagePack: ids of calls that waited
-- earlier in the turn that the run is in), and of an ended run `result` and `error`. Of a run
-- that was deleted only the status
-- `deleted` is left for some time: it does not exist, and cannot be created again.
--
-- The ledger is a hash: `approval:<call>` (a call that waits for a decision), `decision:<call>`,
-- `standing` (decisions for all calls of a tool), `call:<call>` (a call that was started), all in
-- MessagePack, and `output:<call>` (its output, as it was given).
--
-- The journal is a hash: the replies of models in the turn that its owner makes, by their keys.

local ENDED_STATUS = {completed = true, failed = true, cancelled = true}
local EXPIRY = 'expiry'
local DELETED = 'deleted'

local function load_run(run_key)
  local got = redis.call('HMGET', run_key, 'status', 'revision', 'turn', 'owner', 'token',
    'cancel', 'pending', 'updated', 'schema', 'agent', 'unsent', 'listed')
  if not got[1] or got[1] == DELETED then return nil end
  return {
    was = got[1], status = got[1], revision = tonumber(got[2]), turn = tonumber(got[3]),
    owner = got[4], token = tonumber(got[5]), cancel = got[6], pending = cmsgpack.unpack(got[7]),
    updated = tonumber(got[8]), schema = got[9], agent = got[10], unsent = got[11],
    listed = tonumber(got[12] or 0),
  }
end

-- Rings the run's doorbell if its status has changed.
local function save_run(run_key, ledger_key, run, now_us, ttl_ms)
  run.updated = math.max(run.updated + 1, now_us)
  if run.needs_message then run.unsent = whole(run.updated) end
  if run.status ~= 'running' then run.owner = '' end
  if ENDED_STATUS[run.status] then run.pending = {} end
  redis.call('HSET', run_key,
    'status', run.status, 'revision', whole(run.revision), 'turn', whole(run.turn),
    'owner', run.owner, 'token', whole(run.token), 'cancel', run.cancel,
    'pending', cmsgpack.pack(run.pending), 'updated', whole(run.updated),
    'schema', run.schema, 'agent', run.agent, 'unsent', run.unsent,
    'listed', whole(run.listed or 0))
  redis.call('PEXPIRE', run_key, ttl_ms)
  redis.call('PEXPIRE', ledger_key, ttl_ms)
  if run.status ~= run.was then redis.call('PUBLISH', run_key .. ':changed', '') end
end

-- The bytes of the journal with these replies in it: a key and its reply from each pair of values.
local function journal_bytes_with(run_key, journal_key, values, first)
  local bytes = tonumber(redis.call('HGET', run_key, 'journal_bytes') or 0)
  for index = first, #values, 2 do
    bytes = bytes - redis.call('HSTRLEN', journal_key, values[index]) + #values[index + 1]
  end
  return bytes
end

local function add_to_journal(run_key, journal_key, values, first, bytes, ttl_ms)
  for index = first, #values, 2 do
    redis.call('HSET', journal_key, values[index], values[index + 1])
  end
  redis.call('PEXPIRE', journal_key, ttl_ms)
  redis.call('HSET', run_key, 'journal_bytes', whole(bytes))
end

local function entry_of(ledger_key, field)
  local packed = redis.call('HGET', ledger_key, field)
  return packed and cmsgpack.unpack(packed) or nil
end

-- The ids of the calls that wait, and of those that waited earlier in the same turn.
local function calls_of_turn(run_key, run)
  local waited = redis.call('HGET', run_key, 'waited')
  local calls, known = {}, {}
  for _, list in ipairs({waited and cmsgpack.unpack(waited) or {}, run.pending}) do
    for _, call in ipairs(list) do
      if not known[call] then calls[#calls + 1] = call end
      known[call] = true
    end
  end
  return calls
end

-- Decisions within a turn hold until it is over, also about calls that the run waits for no more.
-- Returns whether it is over.
local function note_waited(run_key, run, is_turn_over)
  if is_turn_over then
    redis.call('HDEL', run_key, 'waited')
  else
    redis.call('HSET', run_key, 'waited', cmsgpack.pack(calls_of_turn(run_key, run)))
  end
  return is_turn_over
end

-- Calls that wait, each with its agent and tool, for whoever removes them from the index.
local function waiting_calls(ledger_key, run)
  local calls = {}
  for _, call in ipairs(run.pending) do
    local request = entry_of(ledger_key, 'approval:' .. call)
    if request then calls[#calls + 1] = {call, request.agent, request.tool} end
  end
  return calls
end

-- The decision that counts for a request: an exact one beats a standing one.
local function decision_on(ledger_key, request)
  local exact = entry_of(ledger_key, 'decision:' .. request.call)
  if exact then return exact end
  for _, standing in ipairs(entry_of(ledger_key, 'standing') or {}) do
    if standing.tool == request.tool and standing.agent == request.agent then return standing end
  end
  return nil
end

local function decide(ledger_key, request, decision, always, now_us)
  decision.tool, decision.agent, decision.call = request.tool, request.agent, request.call
  decision.fingerprint, decision.at = request.fingerprint, math.floor(now_us / 1000)
  redis.call('HSET', ledger_key, 'decision:' .. request.call, cmsgpack.pack(decision))
  if not always then return end
  local others = {}
  for _, other in ipairs(entry_of(ledger_key, 'standing') or {}) do
    if other.tool ~= request.tool or other.agent ~= request.agent then
      others[#others + 1] = other
    end
  end
  others[#others + 1] = decision
  redis.call('HSET', ledger_key, 'standing', cmsgpack.pack(others))
end

-- Notes when a change was listed: its writer drops what was added to the index before that. With
-- the key the note is stored at once. Returns the run.
local function note_listed(run, listed, run_key)
  local first
  for _, at_ms in pairs(listed) do first = math.min(first or at_ms, at_ms) end
  run.listed = math.max(run.listed or 0, first or 0)
  if run_key then redis.call('HSET', run_key, 'listed', whole(run.listed)) end
  return run
end

-- The refusal to give a run a status under which it is not in the index of runs, else nil.
-- `listed` has the statuses, each with the time when the run was added under it.
local function unlisted(run, status, listed, now_us)
  if run.status ~= status then
    local at_ms = listed[status]
    if not at_ms or at_ms < (run.listed or 0) or is_outdated(at_ms, now_us) then
      return {LATE, status}
    end
  end
  note_listed(run, listed)
  return nil
end

-- Queues a parked run. Returns 1 if the caller has to send a message for it, else 0.
local function wake(run)
  if run.status ~= 'interrupted' then return 0 end
  run.status, run.needs_message = 'queued', true
  return 1
end

-- Counts a lost owner. The count begins anew once the run has made progress since the last one: a
-- commit, a reply of a model in its journal, a call in its ledger.
local function count_loss(run_key, ledger_key, journal_key, run)
  local progress = run.revision .. ':' .. redis.call('HLEN', journal_key) .. ':'
    .. redis.call('HLEN', ledger_key)
  local known = redis.call('HMGET', run_key, 'lost_at', 'losses')
  local losses = known[1] == progress and tonumber(known[2]) or 0
  redis.call('HSET', run_key, 'lost_at', progress, 'losses', losses + 1)
end

-- Cancels a run without an owner; a worker is sent its message, and ends what waits for the run.
local function cancel_unowned(run)
  run.status, run.needs_message = 'cancelled', true
end

-- The status of a run after these requests have expired.
local function status_after(run, requests)
  if #requests == 0 or run.status == 'running' then return run.status end
  for _, request in ipairs(requests) do
    if request.on_expiry == 'cancel' then return 'cancelled' end
  end
  return 'queued'
end

-- Decides a request whose time limit has passed, as its `on_expiry` says. Returns as `wake` does.
local function expire(ledger_key, run, request, now_us)
  if request.on_expiry == 'cancel' then
    if run.cancel == '' then run.cancel = EXPIRY end
    decide(ledger_key, request, {approved = false, by = EXPIRY}, false, now_us)
    if run.status == 'running' then return 0 end
    cancel_unowned(run)
    return 1
  end
  local decision = {approved = request.on_expiry == 'approve', by = EXPIRY}
  decide(ledger_key, request, decision, false, now_us)
  return wake(run)
end

local function announce(channel, what, run_id, call, by)
  redis.call('PUBLISH', channel, cmsgpack.pack({event = what, run = run_id, call = call, by = by}))
end
