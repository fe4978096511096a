-- Reads the sessions of a tenant.
--
-- KEYS
--   sessions  zset  capsule:{T:<tenant>}:sessions
-- ARGV
--   offset  how many sessions to skip
--   count   of sessions at most
-- RETURNS {DONE, session, …}
-- REFUSES nothing
-- USES common

local sessions_key = KEYS[1]
local offset, count = tonumber(ARGV[1]), tonumber(ARGV[2])

return {DONE, unpack(redis.call('ZRANGE', sessions_key, offset, offset + count - 1))}
