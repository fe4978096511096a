-- Records that a session begins with an empty namespace: what its calls did until now is not lost.
--
-- KEYS
--   session  hash    capsule:{S:<session>}:session
--   calls    stream  capsule:{S:<session>}:calls
-- ARGV
--   token  of the owner
-- RETURNS {DONE, executions until now}
-- REFUSES {STALE, owner, token} an owner that has lost the session
-- USES common, session

local session_key, calls_key = KEYS[1], KEYS[2]
local token = ARGV[1]

local session = load_session(session_key, calls_key)
if not is_owner(session, token) then return {STALE, session.owner or '', session.token} end
local executions = redis.call('HGET', session_key, 'executions') or '0'
redis.call('HSET', session_key, 'before_restart', executions)
return {DONE, tonumber(executions)}
