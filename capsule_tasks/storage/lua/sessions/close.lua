-- Closes a session: now, by its latest owner or where it has none and is idle, else by its owner
-- later.
--
-- What is left is the token, so that whoever knew it finds out that the session was in other
-- hands, the number of the last call, and the ids of calls.
--
-- KEYS
--   session   hash    capsule:{S:<session>}:session
--   calls     stream  capsule:{S:<session>}:calls
--   requests  stream  capsule:{S:<session>}:requests
-- ARGV
--   session_id       for the owner
--   token            that the session must still have, of its latest owner; or 0
--   doorbell_prefix  channel of a worker's doorbell without its incarnation
--   channel          to publish on
-- RETURNS {DONE, 1} a session that is closed; {DONE, 0, owner} one that its owner is to close, or
--         the one who takes it next, or whoever forgets it
-- REFUSES {MISSING} a session that does not exist, or was closed
--         {STALE, owner, token} a session that was taken since
--         {UNFINISHED, unfinished} a session with unfinished calls, if the token is given
-- USES common, session

local session_key, calls_key, requests_key = KEYS[1], KEYS[2], KEYS[3]
local session_id, token, doorbell_prefix, channel = ARGV[1], ARGV[2], ARGV[3], ARGV[4]

local session = load_session(session_key, calls_key)
if token ~= '0' and session.token ~= token then
  return {STALE, session.owner or '', session.token}
end
if not session.profile then return {MISSING} end
if session.forgetting then return {DONE, 0, ''} end
if token ~= '0' then
  if session.unfinished > 0 then return {UNFINISHED, session.unfinished} end
elseif session.owner or session.unfinished > 0 then
  redis.call('HSET', session_key, 'closing', 1)
  if session.owner then
    redis.call('PUBLISH', doorbell_prefix .. session.owner .. ':requests', session_id)
  end
  return {DONE, 0, session.owner or ''}
end
redis.call('HDEL', session_key, 'profile', 'tenant', 'owner', 'created', 'used', 'executions',
  'cpu_ms', 'closing', 'checkpoint', 'before_restart')
redis.call('UNLINK', requests_key)
redis.call('PUBLISH', channel, '')
return {DONE, 1}
