-- Ends the ownership of a session. Repeated, it changes nothing.
--
-- Of a session that was never used only the token is left for a time, so that a producer who knew
-- the one before finds out that the session was in other hands. Of one that was closed the number
-- of the last call is left, too, as long as the log, whose next call needs a larger one.
--
-- KEYS
--   session  hash    capsule:{S:<session>}:session
--   calls    stream  capsule:{S:<session>}:calls
-- ARGV
--   token            of the owner
--   even_unfinished  1 to release it although it has unfinished calls: the caller lists it after
--   token_ttl_ms     how long the token of a session that was never used is left
-- RETURNS {DONE, unfinished}
-- REFUSES {STALE, owner, token} an owner that has lost the session
--         {UNFINISHED, unfinished} a session with unfinished calls
-- USES common, session

local session_key, calls_key = KEYS[1], KEYS[2]
local token, even_unfinished, token_ttl_ms = ARGV[1], ARGV[2] == '1', ARGV[3]

local session = load_session(session_key, calls_key)
if session.token ~= token then return {STALE, session.owner or '', session.token} end
if session.owner then
  if session.unfinished > 0 and not even_unfinished then return {UNFINISHED, session.unfinished} end
  redis.call('HDEL', session_key, 'owner')
  if not session.created then
    redis.call('HDEL', session_key, 'profile', 'closing')
    if session.seq == 0 then redis.call('PEXPIRE', session_key, token_ttl_ms) end
  end
end
return {DONE, session.unfinished}
