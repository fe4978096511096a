-- Shared by the scripts of named sessions: load the record, set when its keys expire.
--
-- The record is a hash: `profile`, `tenant`, `created`, `used` (milliseconds of Redis's clock),
-- `seq` (of the last call in the log), `executions` and `cpu_ms` (of the calls that are done),
-- `owner` (an incarnation, while it has one), `token` (of the latest owner), `begun` and
-- `begun_call` (the call that the owner has begun, at `begun_at`), `closing`, and what owners write of
-- checkpoints; `before_restart`, the executions at the last restart. While it is erased, `forgetting` is the owner that has not left yet, or empty.
--
-- Its call log is a stream with the ids `<seq>-0`: the call that was begun, and those that wait.
-- The ids of calls are in `known`, under infinity until the call is done, then under the time.
--
-- A session that has calls in its log and no owner is wanted, or about to be: whoever appends the
-- first call has listed it before, and whoever ends an ownership lists it after. The token tells
-- whether somebody took the session in between, and so may have removed it from the list.

local FIELDS = {'profile', 'tenant', 'owner', 'token', 'seq', 'begun', 'begun_call', 'closing',
  'created', 'forgetting'}

local function load_session(session_key, calls_key)
  local got = redis.call('HMGET', session_key, unpack(FIELDS))
  local session = {unfinished = redis.call('XLEN', calls_key)}
  for n, name in ipairs(FIELDS) do session[name] = got[n] or nil end
  session.token = session.token or '0'
  session.seq = tonumber(session.seq or 0)
  session.waiting = session.unfinished - (session.begun and 1 or 0)
  return session
end

-- Whether this token is the one of the session's owner.
local function is_owner(session, token)
  return session.owner and session.token == token
end

-- Calls of the log after an id, up to a number: the id's first part, the call's id, its payload.
local function calls_after(calls_key, after, count)
  local found = {}
  for n, entry in ipairs(redis.call('XRANGE', calls_key, after, '+', 'COUNT', count)) do
    local fields = entry[2]
    found[n] = {seq = entry[1]:match('^%d+'), call = fields[2], payload = fields[4]}
  end
  return found
end
