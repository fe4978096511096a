-- Records the state of executions in the index of recent ones; drops the oldest above a maximum.
--
-- KEYS
--   order    zset  capsule:{recent}:order
--   entries  hash  capsule:{recent}:entries
-- ARGV
--   max_entries  of the index
--   ttl_ms       until the index expires, after the last write
--   channel      to publish on
--   update...    id, attempt, record, …; one of an older attempt changes nothing
-- RETURNS {DONE}
-- REFUSES nothing
-- USES common

local order_key, entries_key = KEYS[1], KEYS[2]
local max_entries, ttl_ms, channel = tonumber(ARGV[1]), ARGV[2], ARGV[3]
local FIRST = 4

local SLICE = 500

-- No two entries have the same time, so that a page can end between any two.
local last = redis.call('ZREVRANGE', order_key, 0, 0, 'WITHSCORES')
local now_us = math.max(clock_us(), (tonumber(last[2]) or 0) + 1)
for n = FIRST, #ARGV, 3 do
  local id, attempt, record = ARGV[n], ARGV[n + 1], ARGV[n + 2]
  local known = redis.call('HGET', entries_key, id)
  local known_attempt = known and tonumber(known:match('^(%d+):')) or -1
  if tonumber(attempt) >= known_attempt then
    redis.call('HSET', entries_key, id, attempt .. ':' .. whole(now_us) .. ':' .. record)
    redis.call('ZADD', order_key, whole(now_us), id)
    now_us = now_us + 1
  end
end
local over = math.min(redis.call('ZCARD', order_key) - max_entries, SLICE)
if over > 0 then
  local oldest = redis.call('ZRANGE', order_key, 0, over - 1)
  redis.call('ZREM', order_key, unpack(oldest))
  redis.call('HDEL', entries_key, unpack(oldest))
end
redis.call('PEXPIRE', order_key, ttl_ms)
redis.call('PEXPIRE', entries_key, ttl_ms)
redis.call('PUBLISH', channel, '')
return {DONE}
