-- Counts the sessions that are wanted.
--
-- KEYS
--   wanted  zset  capsule:{wanted:<profile>}
-- ARGV
-- RETURNS {DONE, sessions}
-- REFUSES nothing
-- USES common

local wanted_key = KEYS[1]

return {DONE, redis.call('ZCARD', wanted_key)}
