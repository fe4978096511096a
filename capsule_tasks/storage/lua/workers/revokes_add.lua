-- Stores revokes and announces new ones. Adding one twice changes nothing.
--
-- KEYS
--   revokes  zset  capsule:{revokes}
-- ARGV
--   ttl_ms       how long they are stored
--   max_revokes  how many are stored; the oldest are dropped
--   channel      of new revokes
--   member...    a task id after `t`, or a stamp as JSON after `s`
-- RETURNS {DONE}
-- REFUSES nothing
-- USES common

local revokes_key = KEYS[1]
local ttl_ms, max_revokes, channel = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3]
local FIRST = 4

local now_ms = math.floor(clock_us() / 1000)
local added = 0
for n = FIRST, #ARGV do
  added = added + redis.call('ZADD', revokes_key, whole(now_ms), ARGV[n])
end
redis.call('ZREMRANGEBYSCORE', revokes_key, '-inf', whole(now_ms - ttl_ms))
redis.call('ZREMRANGEBYRANK', revokes_key, 0, -max_revokes - 1)
redis.call('PEXPIRE', revokes_key, whole(ttl_ms))
-- Every worker that receives a broadcast revoke stores it: only the first one announces it.
if added > 0 then
  redis.pcall('PUBLISH', channel, '') -- they are stored even if this user may not publish
end
return {DONE}
