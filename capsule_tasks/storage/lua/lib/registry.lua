-- Shared by the scripts of registries: members by the time when somebody should look at them.

-- Removes ARGV[first..], registers a member unless it is empty, and lists those that are due.
local function look_up(registry_key, member, in_ms, ttl_ms, max_due, first)
  local now_ms = math.floor(clock_us() / 1000)
  for n = first, #ARGV do redis.call('ZREM', registry_key, ARGV[n]) end
  if member ~= '' then
    redis.call('ZADD', registry_key, whole(now_ms + in_ms), member)
    redis.call('PEXPIRE', registry_key, ttl_ms)
  end
  local due = redis.call('ZRANGEBYSCORE', registry_key, '-inf', whole(now_ms), 'LIMIT', 0, max_due)
  local next = redis.call('ZRANGEBYSCORE', registry_key, '(' .. whole(now_ms), '+inf',
    'WITHSCORES', 'LIMIT', 0, 1)
  local next_ms = next[2] and math.max(0, tonumber(next[2]) - now_ms) or -1
  return {DONE, next_ms, unpack(due)}
end
