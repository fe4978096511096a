-- Removes executions from the index of recent ones.
--
-- KEYS
--   order    zset  capsule:{recent}:order
--   entries  hash  capsule:{recent}:entries
-- ARGV
--   id...  of executions
-- RETURNS {DONE}
-- REFUSES nothing
-- USES common

local order_key, entries_key = KEYS[1], KEYS[2]
local FIRST = 1

for n = FIRST, #ARGV do
  redis.call('ZREM', order_key, ARGV[n])
  redis.call('HDEL', entries_key, ARGV[n])
end
return {DONE}
