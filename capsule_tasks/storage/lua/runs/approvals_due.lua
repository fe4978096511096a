-- Reads calls whose time limit has passed, and when the next one's will.
--
-- KEYS
--   due      zset  capsule:{approvals}:due
--   entries  hash  capsule:{approvals}:entries
-- ARGV
--   count  of calls at most
-- RETURNS {DONE, ms until the next one is due or -1, member, details, and so on}
-- REFUSES nothing
-- USES common

local due_key, entries_key = KEYS[1], KEYS[2]
local count = ARGV[1]

local now_ms = math.floor(clock_us() / 1000)
local found = redis.call('ZRANGEBYSCORE', due_key, '-inf', whole(now_ms), 'LIMIT', 0, count)
local later = redis.call('ZRANGEBYSCORE', due_key, '(' .. whole(now_ms), '+inf', 'WITHSCORES',
  'LIMIT', 0, 1)
local reply = {DONE, later[2] and tonumber(later[2]) - now_ms or -1}
for _, member in ipairs(found) do
  reply[#reply + 1] = member
  reply[#reply + 1] = redis.call('HGET', entries_key, 'd' .. member) or ''
end
return reply
