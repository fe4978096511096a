-- Ends the ownership of a session. Repeated, it changes nothing.
--
-- KEYS
--   session  hash    capsule:{S:<session>}:session
--   calls    stream  capsule:{S:<session>}:calls
-- ARGV
--   token            of the owner
--   even_unfinished  1 to release it although it has unfinished calls: the caller lists it after
-- RETURNS {DONE, unfinished}
-- REFUSES {STALE, owner, token} an owner that has lost the session
--         {UNFINISHED, unfinished} a session with unfinished calls
-- USES common, session

local session_key, calls_key = KEYS[1], KEYS[2]
local token, even_unfinished = ARGV[1], ARGV[2] == '1'

local session = load_session(session_key, calls_key)
if session.token ~= token then return {STALE, session.owner or '', session.token} end
if session.owner then
  if session.unfinished > 0 and not even_unfinished then return {UNFINISHED, session.unfinished} end
  redis.call('HDEL', session_key, 'owner')
end
return {DONE, session.unfinished}
