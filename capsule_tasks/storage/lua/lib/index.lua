-- Shared by the scripts of indexes: ids in a sorted set by time, and a hash with an entry for each.

local SLICE = 500 -- entries that are dropped at a time

-- The time of the next entry. No two have the same, so that a page can end between any two.
local function next_us(order_key)
  local last = redis.call('ZREVRANGE', order_key, 0, 0, 'WITHSCORES')
  return math.max(clock_us(), (tonumber(last[2]) or 0) + 1)
end

local function put(order_key, entries_key, id, entry, now_us)
  redis.call('HSET', entries_key, id, entry)
  redis.call('ZADD', order_key, whole(now_us), id)
end

local function drop(order_key, entries_key, ids)
  if #ids == 0 then return end
  redis.call('ZREM', order_key, unpack(ids))
  redis.call('HDEL', entries_key, unpack(ids))
end

-- Drops the oldest entries above a maximum, and sets when the index expires.
local function trim(order_key, entries_key, max_entries, ttl_ms)
  local over = math.min(redis.call('ZCARD', order_key) - max_entries, SLICE)
  if over > 0 then drop(order_key, entries_key, redis.call('ZRANGE', order_key, 0, over - 1)) end
  redis.call('PEXPIRE', order_key, ttl_ms)
  redis.call('PEXPIRE', entries_key, ttl_ms)
end

-- Replies with a page of entries, the latest first: id, microseconds, and what `shown` makes of the
-- entry. Those of which it makes nothing are left out.
local function reply_page(order_key, entries_key, before, count, shown)
  local top = before == '' and '+inf' or '(' .. before
  local found = redis.call('ZREVRANGEBYSCORE', order_key, top, '-inf', 'WITHSCORES',
    'LIMIT', 0, count)
  local reply = {DONE}
  for n = 1, #found, 2 do
    local entry = shown(redis.call('HGET', entries_key, found[n]))
    if entry then
      reply[#reply + 1] = found[n]
      reply[#reply + 1] = whole(tonumber(found[n + 1]))
      reply[#reply + 1] = entry
    end
  end
  return reply
end
