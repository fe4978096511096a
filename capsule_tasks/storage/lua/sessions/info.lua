-- Reads what is known of a session.
--
-- KEYS
--   session  hash    capsule:{S:<session>}:session
--   calls    stream  capsule:{S:<session>}:calls
-- ARGV
-- RETURNS {DONE, unfinished, field, value, …}
-- REFUSES {MISSING} a session that was never used, was closed, or has expired
-- USES common, session

local session_key, calls_key = KEYS[1], KEYS[2]

local session = load_session(session_key, calls_key)
if not (session.created or session.owner) then return {MISSING} end
return {DONE, session.unfinished, unpack(redis.call('HGETALL', session_key))}
