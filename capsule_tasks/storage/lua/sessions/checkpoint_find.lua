-- Reads the manifest of a session's checkpoint.
--
-- KEYS
--   session  hash  capsule:{S:<session>}:session
-- ARGV
--   token  of the owner, who is about to write a checkpoint; 0 for a reader
-- RETURNS {DONE, manifest}; empty without a checkpoint
-- REFUSES {STALE, owner} an owner that has lost the session
-- USES common

local session_key, token = KEYS[1], ARGV[1]

local got = redis.call('HMGET', session_key, 'owner', 'token', 'checkpoint')
if token ~= '0' and not (got[1] and got[2] == token) then return {STALE, got[1] or ''} end
return {DONE, got[3] or ''}
