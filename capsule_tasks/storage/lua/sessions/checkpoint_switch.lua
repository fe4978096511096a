-- Makes what was staged the checkpoint of a session, in the place of the previous one.
--
-- KEYS
--   session   hash  capsule:{S:<session>}:session
--   staged    list  capsule:{S:<session>}:checkpoint:<generation>
--   previous  list  capsule:{S:<session>}:checkpoint:<generation>
-- ARGV
--   token     of the owner
--   chunks    that have to be staged; 0 if they are kept elsewhere
--   manifest  of the checkpoint, opaque; it is stored behind the time and a space
--   ttl_ms    until the checkpoint expires
-- RETURNS {DONE, manifest}; also for a repeat by an owner that has lost the session since
-- REFUSES {STALE, owner} an owner that has lost the session; what it staged is erased
--         {LOST, length} a list that does not have as many chunks
-- USES common

local session_key, staged_key, previous_key = KEYS[1], KEYS[2], KEYS[3]
local token, chunks, manifest, ttl_ms = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4]

local got = redis.call('HMGET', session_key, 'owner', 'token', 'checkpoint')
local stored = got[3]
if stored and stored:sub(stored:find(' ', 1, true) + 1) == manifest then return {DONE, stored} end
if not (got[1] and got[2] == token) then
  redis.call('UNLINK', staged_key)
  return {STALE, got[1] or ''}
end
local length = redis.call('LLEN', staged_key)
if length ~= chunks then return {LOST, length} end
stored = whole(clock_us()) .. ' ' .. manifest
redis.call('HSET', session_key, 'checkpoint', stored)
redis.call('PEXPIRE', staged_key, ttl_ms)
if previous_key ~= staged_key then redis.call('UNLINK', previous_key) end
return {DONE, stored}
