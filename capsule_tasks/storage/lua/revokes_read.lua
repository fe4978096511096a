-- Tells what was revoked since a moment, oldest first.
--
-- KEYS
--   revokes  zset  capsule:{revokes}
-- ARGV
--   since_ms  the moment, by the clock of Redis; 0 for all
--   most      how many
-- RETURNS {DONE, now ms, [member, …]}
-- REFUSES nothing
-- USES once

local revokes_key = KEYS[1]
local since_ms, most = ARGV[1], tonumber(ARGV[2])

local now_ms = whole(math.floor(clock_us() / 1000))
local found = redis.call('ZRANGEBYSCORE', revokes_key, since_ms, '+inf', 'LIMIT', 0, most)
return {DONE, now_ms, found}
