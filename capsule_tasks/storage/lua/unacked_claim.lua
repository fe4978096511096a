-- Takes messages that nobody has renewed for too long, so that this caller alone puts them back.
--
-- KEYS
--   index  zset  unacked_index
--   marks  zset  unacked_index.renewed
-- ARGV
--   now_s      by the caller's clock, which is the one that kombu writes scores with
--   renewed_s  how old the mark of a message is that its worker would have renewed
--   other_s    how old any other message is
--   hold_s     until it can be taken again, should this caller not put it back
--   most       how many at once
-- RETURNS {DONE, tag, …}
-- REFUSES nothing
-- USES once

local index_key, marks_key = KEYS[1], KEYS[2]
local now_s, renewed_s, other_s = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local hold_s, most = tonumber(ARGV[4]), tonumber(ARGV[5])

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
local marked = redis.call('ZRANGEBYSCORE', marks_key, '-inf', old, 'WITHSCORES', 'LIMIT', 0, most)
for at = 1, #marked, 2 do
  local listed = redis.call('ZSCORE', index_key, marked[at])
  -- A later delivery, to a worker that writes no marks, or an end that such a worker has seen to.
  if not listed or tonumber(listed) > tonumber(marked[at + 1]) then
    redis.call('ZREM', marks_key, marked[at])
  else
    take(marked[at], now_s - renewed_s + hold_s)
  end
end
old = exact(now_s - other_s)
for _, tag in ipairs(redis.call('ZRANGEBYSCORE', index_key, '-inf', old, 'LIMIT', 0, most)) do
  take(tag, now_s - other_s + hold_s)
end
redis.call('EXPIRE', marks_key, math.ceil(2 * math.max(renewed_s, other_s)))
return reply
