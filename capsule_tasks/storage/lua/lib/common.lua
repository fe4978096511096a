local function whole(number)
  return string.format('%d', number)
end

local function clock_us()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000000 + tonumber(time[2])
end

local MAX_OLD = 100 -- members that are removed at a time

-- Removes members of a sorted set up to a score. What is left over goes with a later call.
local function drop_until(zset_key, score)
  local old = redis.call('ZRANGEBYSCORE', zset_key, '-inf', whole(score), 'LIMIT', 0, MAX_OLD)
  if #old > 0 then redis.call('ZREM', zset_key, unpack(old)) end
end
