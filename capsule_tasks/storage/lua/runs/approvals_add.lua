-- Adds calls of one tool by one agent to the index of approvals, before they wait.
--
-- KEYS
--   all      zset  capsule:{approvals}:all
--   due      zset  capsule:{approvals}:due
--   entries  hash  capsule:{approvals}:entries
--   agent    zset  capsule:{approvals}:agent:<agent>
--   tool     zset  capsule:{approvals}:tool:<tool>
--   both     zset  capsule:{approvals}:both:<agent>:<tool>
-- ARGV
--   ttl_ms   until the index expires
--   part...  member, details, ms until it is due (0: never), and so on
-- RETURNS {DONE, ms of Redis's clock}
-- REFUSES nothing
-- USES common

local all_key, due_key, entries_key, agent_key, tool_key, both_key = unpack(KEYS)
local ttl_ms = ARGV[1]
local FIRST = 2

local now_us = clock_us()
local newest = redis.call('ZREVRANGE', all_key, 0, 0, 'WITHSCORES')[2]
local score = math.max(now_us, tonumber(newest or 0) + 1)
for index = FIRST, #ARGV, 3 do
  local member, details, due_in_ms = ARGV[index], ARGV[index + 1], tonumber(ARGV[index + 2])
  local position = redis.call('ZSCORE', all_key, member) or whole(score)
  for _, key in ipairs({all_key, agent_key, tool_key, both_key}) do
    redis.call('ZADD', key, position, member)
  end
  if due_in_ms > 0 then
    redis.call('ZADD', due_key, 'NX', whole(math.floor(now_us / 1000) + due_in_ms), member)
  end
  redis.call('HSET', entries_key, 'd' .. member, details, 't' .. member, whole(now_us))
  score = score + 1
end
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, ttl_ms) end
return {DONE, whole(math.floor(now_us / 1000))}
