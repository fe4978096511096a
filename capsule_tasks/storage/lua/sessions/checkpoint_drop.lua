-- Removes one generation of a session's checkpoint, and the manifest that names it.
--
-- KEYS
--   session  hash  capsule:{S:<session>}:session
--   staged   list  capsule:{S:<session>}:checkpoint:<generation>
-- ARGV
--   stored  the manifest as it was read; another one stays
-- RETURNS {DONE}
-- REFUSES {CHANGED} a session whose checkpoint is another one now
-- USES common

local session_key, staged_key = KEYS[1], KEYS[2]
local stored = ARGV[1]

local found = redis.call('HGET', session_key, 'checkpoint')
if found and found ~= stored then return {CHANGED} end
if found then redis.call('HDEL', session_key, 'checkpoint') end
redis.call('UNLINK', staged_key)
return {DONE}
