-- Begins the next call of a session's log; the one that was begun already, if it is not done.
--
-- KEYS
--   session  hash    capsule:{S:<session>}:session
--   calls    stream  capsule:{S:<session>}:calls
-- ARGV
--   token  of the owner
-- RETURNS {DONE, seq, call, payload, tenant}, or {DONE} if no call waits
-- REFUSES {STALE, owner, token} an owner that has lost the session
-- USES common, session

local session_key, calls_key = KEYS[1], KEYS[2]
local token = ARGV[1]

local session = load_session(session_key, calls_key)
if not is_owner(session, token) then return {STALE, session.owner or '', session.token} end
local next = calls_after(calls_key, '-', 1)[1]
if not next then return {DONE} end
if not session.begun then
  local now_ms = whole(math.floor(clock_us() / 1000))
  redis.call('HSET', session_key, 'begun', next.seq, 'begun_call', next.call, 'begun_at', now_ms)
end
return {DONE, tonumber(next.seq), next.call, next.payload, session.tenant or ''}
