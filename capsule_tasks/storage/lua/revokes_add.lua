-- Keeps what was revoked and announces what is new. Doing it twice changes nothing.
--
-- KEYS
--   revokes  zset  capsule:{revokes}
-- ARGV
--   keep_ms    how long
--   most       how many are kept; the oldest go first
--   channel    on which workers listen
--   member...  a task id after `t`, or a stamp as JSON after `s`
-- RETURNS {DONE}
-- REFUSES nothing
-- USES once

local revokes_key = KEYS[1]
local keep_ms, most, channel = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3]
local FIRST = 4

local now_ms = math.floor(clock_us() / 1000)
local added = 0
for at = FIRST, #ARGV do
  added = added + redis.call('ZADD', revokes_key, whole(now_ms), ARGV[at])
end
redis.call('ZREMRANGEBYSCORE', revokes_key, '-inf', whole(now_ms - keep_ms))
redis.call('ZREMRANGEBYRANK', revokes_key, 0, -most - 1)
redis.call('PEXPIRE', revokes_key, whole(keep_ms))
-- Every worker that hears a broadcast revoke keeps it: only the first of them announces it.
if added > 0 then
  redis.pcall('PUBLISH', channel, '') -- a user who may not publish keeps them all the same
end
return {DONE}
