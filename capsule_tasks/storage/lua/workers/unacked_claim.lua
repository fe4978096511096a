-- Reserves overdue unacknowledged messages for this caller, which requeues them.
--
-- KEYS
--   index  zset  unacked_index
--   marks  zset  unacked_index.renewed
-- ARGV
--   now_s      by the caller's clock; kombu writes scores by the clocks of workers
--   renewed_s  age at which a message with a renewal mark is overdue
--   other_s    age at which any other message is overdue
--   reserve_s  until another caller may reserve it, if this one does not requeue it
--   max_tags   how many at most
-- RETURNS {DONE, tag, …}
-- REFUSES nothing
-- USES common

local index_key, marks_key = KEYS[1], KEYS[2]
local now_s, renewed_s, other_s = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local reserve_s, max_tags = tonumber(ARGV[4]), tonumber(ARGV[5])

local function exact(seconds)
  return string.format('%.6f', seconds)
end

local reply = {DONE}
local function take(tag, score)
  redis.call('ZADD', index_key, 'XX', exact(score), tag)
  redis.call('ZADD', marks_key, 'XX', exact(score), tag)
  reply[#reply + 1] = tag
end

local old = exact(now_s - renewed_s)
local marked = redis.call('ZRANGEBYSCORE', marks_key, '-inf', old, 'WITHSCORES',
  'LIMIT', 0, max_tags)
for n = 1, #marked, 2 do
  local listed = redis.call('ZSCORE', index_key, marked[n])
  -- Acknowledged by, or redelivered to, a worker that writes no renewal marks.
  if not listed or tonumber(listed) > tonumber(marked[n + 1]) then
    redis.call('ZREM', marks_key, marked[n])
  else
    take(marked[n], now_s - renewed_s + reserve_s)
  end
end
old = exact(now_s - other_s)
for _, tag in ipairs(redis.call('ZRANGEBYSCORE', index_key, '-inf', old, 'LIMIT', 0, max_tags)) do
  take(tag, now_s - other_s + reserve_s)
end
redis.call('EXPIRE', marks_key, math.ceil(2 * math.max(renewed_s, other_s)))
return reply
