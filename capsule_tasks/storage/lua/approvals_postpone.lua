-- Has a call whose time seemed to have passed looked at later, so that it hides none behind it.
--
-- KEYS
--   due  zset  capsule:{approvals}:due
-- ARGV
--   member    of the index
--   at_ms     when its time passes; 0 if that is not known
--   least_ms  from now on, whatever its time is
-- RETURNS {DONE, ms until it is looked at}
-- REFUSES nothing
-- USES once

local due_key = KEYS[1]
local member, at_ms, least_ms = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])

local now_ms = math.floor(clock_us() / 1000)
local later_ms = math.max(at_ms, now_ms + least_ms)
redis.call('ZADD', due_key, 'XX', whole(later_ms), member)
return {DONE, later_ms - now_ms}
