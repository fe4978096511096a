-- Takes a loss back: the process that was expected to be lost ended in order.
--
-- KEYS
--   losses  set  capsule:{E:<execution>}:losses:<attempt>
-- ARGV
--   loss  its id
-- RETURNS {DONE}
-- REFUSES nothing
-- USES common

local losses_key = KEYS[1]
local loss = ARGV[1]

redis.call('SREM', losses_key, loss)
return {DONE}
