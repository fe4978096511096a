-- Tells whoever forgets a session that the worker which owned it has left it.
--
-- KEYS
--   session  hash  capsule:{S:<session>}:session
-- ARGV
--   incarnation  of the worker
--   channel      to publish on
-- RETURNS {DONE}
-- REFUSES nothing
-- USES common

local session_key = KEYS[1]
local incarnation, channel = ARGV[1], ARGV[2]

if redis.call('HGET', session_key, 'forgetting') == incarnation then
  redis.call('HSET', session_key, 'forgetting', '')
  redis.call('PUBLISH', channel, '')
end
return {DONE}
