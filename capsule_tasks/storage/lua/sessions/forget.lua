-- Erases all that Redis has of a session under keys that do not depend on what was stored in it:
-- its record and calls, and its history. Its owner is rung, and finds out that it has lost it.
--
-- Only the token is left for ten minutes, so that whoever knew it finds out, too.
--
-- KEYS
--   session     hash    capsule:{S:<session>}:session
--   calls       stream  capsule:{S:<session>}:calls
--   known       zset    capsule:{S:<session>}:known
--   requests    stream  capsule:{S:<session>}:requests
--   items       list    capsule:{S:<session>}:items
--   history     hash    capsule:{S:<session>}:history
--   quarantine  list    capsule:{S:<session>}:quarantine
-- ARGV
--   session_id       for the owner
--   token_ttl_ms     how long the token is left
--   doorbell_prefix  channel of a worker's doorbell without its incarnation
--   channel          to publish on
-- RETURNS {DONE}
-- REFUSES nothing
-- USES common

local session_key, calls_key, known_key, requests_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local items_key, history_key, quarantine_key = KEYS[5], KEYS[6], KEYS[7]
local session_id, token_ttl_ms, doorbell_prefix, channel = ARGV[1], ARGV[2], ARGV[3], ARGV[4]

local got = redis.call('HMGET', session_key, 'token', 'owner')
redis.call('UNLINK', session_key, calls_key, known_key, requests_key)
redis.call('UNLINK', items_key, history_key, quarantine_key)
if got[1] then
  redis.call('HSET', session_key, 'token', got[1])
  redis.call('PEXPIRE', session_key, token_ttl_ms)
end
if got[2] then redis.call('PUBLISH', doorbell_prefix .. got[2] .. ':sessions', session_id) end
redis.call('PUBLISH', channel, '')
return {DONE}
