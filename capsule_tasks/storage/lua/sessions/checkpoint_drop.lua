-- Removes one generation of a session's checkpoint, and the manifest that names it.
--
-- KEYS
--   session  hash  capsule:{S:<session>}:session
--   staged   list  capsule:{S:<session>}:checkpoint:<generation>
-- ARGV
--   token   of the session's latest owner; 0 whoever that is
--   stored  the manifest as it was read; another one stays
-- RETURNS {DONE}
-- REFUSES {STALE, owner} a session that was taken since
--         {CHANGED} a session whose checkpoint is another one now
-- USES common

local session_key, staged_key = KEYS[1], KEYS[2]
local token, stored = ARGV[1], ARGV[2]

local got = redis.call('HMGET', session_key, 'owner', 'token', 'checkpoint')
if token ~= '0' and got[2] ~= token then return {STALE, got[1] or ''} end
local found = got[3]
if found and found ~= stored then return {CHANGED} end
if found then redis.call('HDEL', session_key, 'checkpoint') end
redis.call('UNLINK', staged_key)
return {DONE}
