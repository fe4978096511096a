-- Answers a request to the owner of a session, and announces the reply.
--
-- KEYS
--   session   hash    capsule:{S:<session>}:session
--   requests  stream  capsule:{S:<session>}:requests
--   reply     string  capsule:{S:<session>}:reply:<request>
-- ARGV
--   token    of the latest owner, which may have released the session since
--   entry    of the request, which is removed
--   answer   the reply
--   ttl_ms   how long it waits for its reader
--   channel  to publish on
-- RETURNS {DONE}
-- REFUSES {STALE, owner, token} an owner that another has followed
-- USES common

local session_key, requests_key, reply_key = KEYS[1], KEYS[2], KEYS[3]
local token, entry, answer, ttl_ms, channel = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]

local got = redis.call('HMGET', session_key, 'token', 'owner')
if got[1] ~= token then return {STALE, got[2] or '', got[1] or '0'} end
redis.call('XDEL', requests_key, entry)
redis.call('SET', reply_key, answer, 'PX', ttl_ms)
redis.call('PUBLISH', channel, '')
return {DONE}
