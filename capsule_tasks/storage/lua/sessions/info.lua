-- Reads what is known of a session.
--
-- KEYS
--   session  hash    capsule:{S:<session>}:session
--   calls    stream  capsule:{S:<session>}:calls
-- ARGV
-- RETURNS {DONE, unfinished, field, value, …}
-- REFUSES {MISSING} a session that does not exist
-- USES common, session

local session_key, calls_key = KEYS[1], KEYS[2]

local session = load_session(session_key, calls_key)
if not session.profile then return {MISSING} end
return {DONE, session.unfinished, unpack(redis.call('HGETALL', session_key))}
