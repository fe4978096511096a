-- Postpones a call that seemed to be due, so that it does not hide the calls after it.
--
-- KEYS
--   due  zset  capsule:{approvals}:due
-- ARGV
--   member  of the index
--   at_ms   when its time passes; 0 if unknown
--   min_ms  earliest time from now
-- RETURNS {DONE, ms until it is due}
-- REFUSES nothing
-- USES common

local due_key = KEYS[1]
local member, at_ms, min_ms = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])

local now_ms = math.floor(clock_us() / 1000)
local later_ms = math.max(at_ms, now_ms + min_ms)
redis.call('ZADD', due_key, 'XX', whole(later_ms), member)
return {DONE, later_ms - now_ms}
