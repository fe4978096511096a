-- Reads what was revoked since a moment, oldest first.
--
-- KEYS
--   revokes  zset  capsule:{revokes}
-- ARGV
--   since_ms     the moment, by the clock of Redis; 0 for all
--   max_revokes  how many
-- RETURNS {DONE, now ms, [member, …]}
-- REFUSES nothing
-- USES common

local revokes_key = KEYS[1]
local since_ms, max_revokes = ARGV[1], tonumber(ARGV[2])

local now_ms = whole(math.floor(clock_us() / 1000))
local found = redis.call('ZRANGEBYSCORE', revokes_key, since_ms, '+inf', 'LIMIT', 0, max_revokes)
return {DONE, now_ms, found}
