-- Keeps what was revoked, for workers that were not there. Doing it twice changes nothing.
--
-- KEYS
--   revokes  zset  capsule:{revokes}
-- ARGV
--   keep_ms     how long
--   most        how many are kept; the oldest go first
--   member...  what
-- RETURNS {DONE}
-- REFUSES nothing
-- USES once

local revokes_key = KEYS[1]
local keep_ms, most = tonumber(ARGV[1]), tonumber(ARGV[2])
local FIRST = 3

local now_ms = math.floor(clock_us() / 1000)
for at = FIRST, #ARGV do
  redis.call('ZADD', revokes_key, whole(now_ms), ARGV[at])
end
redis.call('ZREMRANGEBYSCORE', revokes_key, '-inf', whole(now_ms - keep_ms))
redis.call('ZREMRANGEBYRANK', revokes_key, 0, -most - 1)
redis.call('PEXPIRE', revokes_key, whole(keep_ms))
return {DONE}
