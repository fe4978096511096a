-- Records sessions in the index of them; drops the oldest above a maximum.
--
-- KEYS
--   order    zset  capsule:{sessions}:order
--   entries  hash  capsule:{sessions}:entries
-- ARGV
--   max_entries  of the index
--   ttl_ms       until the index expires, after the last write
--   update...    id, record, …; an empty record drops the session
-- RETURNS {DONE}
-- REFUSES nothing
-- USES common

local order_key, entries_key = KEYS[1], KEYS[2]
local max_entries, ttl_ms = tonumber(ARGV[1]), tonumber(ARGV[2])
local FIRST = 3

local SLICE = 500

local function drop(ids)
  redis.call('ZREM', order_key, unpack(ids))
  redis.call('HDEL', entries_key, unpack(ids))
end

-- No two entries have the same time, so that a page can end between any two.
local last = redis.call('ZREVRANGE', order_key, 0, 0, 'WITHSCORES')
local now_us = math.max(clock_us(), (tonumber(last[2]) or 0) + 1)
for n = FIRST, #ARGV, 2 do
  local id, record = ARGV[n], ARGV[n + 1]
  if record == '' then
    drop({id})
  else
    redis.call('HSET', entries_key, id, record)
    redis.call('ZADD', order_key, whole(now_us), id)
    now_us = now_us + 1
  end
end
local old = redis.call('ZRANGEBYSCORE', order_key, '-inf', whole(now_us - ttl_ms * 1000),
  'LIMIT', 0, SLICE)
if #old > 0 then drop(old) end
local over = math.min(redis.call('ZCARD', order_key) - max_entries, SLICE)
if over > 0 then drop(redis.call('ZRANGE', order_key, 0, over - 1)) end
redis.call('PEXPIRE', order_key, ttl_ms)
redis.call('PEXPIRE', entries_key, ttl_ms)
return {DONE}
