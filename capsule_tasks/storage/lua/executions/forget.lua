-- Erases an execution; its watchers are rung. A worker that still runs it is refused its next write.
--
-- KEYS
--   meta     hash    capsule:{E:<execution>}:meta
--   events   stream  capsule:{E:<execution>}:events
--   control  stream  capsule:{E:<execution>}:control
-- ARGV
--   channel  to publish on
-- RETURNS {DONE}
-- REFUSES nothing
-- USES common

local meta_key, events_key, control_key = KEYS[1], KEYS[2], KEYS[3]
local channel = ARGV[1]

redis.call('UNLINK', meta_key, events_key, control_key)
redis.call('PUBLISH', channel, '')
return {DONE}
