-- Reads what the sessions of a tenant have used, and how many of them are live.
--
-- KEYS
--   usage  hash  capsule:{T:<tenant>}:usage
--   live   zset  capsule:{T:<tenant>}:live
-- ARGV
--   window_ms  length of a window
-- RETURNS {DONE, live sessions, start of the window in ms, its processor ms, its calls,
--         processor ms in all, calls in all}
-- REFUSES nothing
-- USES common

local usage_key, live_key = KEYS[1], KEYS[2]
local window_ms = tonumber(ARGV[1])

local now_ms = math.floor(clock_us() / 1000)
local window = whole(now_ms - now_ms % window_ms)
local got = redis.call('HMGET', usage_key, 'window', 'cpu_ms', 'calls', 'total_cpu_ms',
  'total_calls')
if got[1] ~= window then got[2], got[3] = '0', '0' end
local live = redis.call('ZCOUNT', live_key, '(' .. whole(now_ms), '+inf')
return {DONE, live, window, got[2], got[3], got[4] or '0', got[5] or '0'}
