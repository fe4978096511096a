-- Removes the chunks of a checkpoint that will not be finished.
--
-- KEYS
--   session  hash  capsule:{S:<session>}:session
--   staged   list  capsule:{S:<session>}:checkpoint:<generation>
-- ARGV
--   generation  of the chunks, as its manifest would name it
-- RETURNS {DONE}
-- REFUSES {CHANGED} a generation that is the session's checkpoint
-- USES common

local session_key, staged_key = KEYS[1], KEYS[2]
local generation = ARGV[1]

local stored = redis.call('HGET', session_key, 'checkpoint')
if stored and stored:find(generation, 1, true) then return {CHANGED} end
redis.call('UNLINK', staged_key)
return {DONE}
