-- Removes a call from the index of approvals.
--
-- KEYS
--   all      zset  capsule:{approvals}:all
--   due      zset  capsule:{approvals}:due
--   entries  hash  capsule:{approvals}:entries
--   agent    zset  capsule:{approvals}:agent:<agent>
--   tool     zset  capsule:{approvals}:tool:<tool>
--   both     zset  capsule:{approvals}:both:<agent>:<tool>
-- ARGV
--   member   of the index to remove
--   idle_ms  a younger entry stays, because its call may be about to wait
-- RETURNS {DONE, 1} if it was removed, {DONE, 0} if it stays
-- REFUSES nothing
-- USES common

local all_key, due_key, entries_key, agent_key, tool_key, both_key = unpack(KEYS)
local member, idle_ms = ARGV[1], tonumber(ARGV[2])

local put_us = tonumber(redis.call('HGET', entries_key, 't' .. member) or 0)
if clock_us() - put_us < idle_ms * 1000 then return {DONE, 0} end
for _, key in ipairs({all_key, due_key, agent_key, tool_key, both_key}) do
  redis.call('ZREM', key, member)
end
redis.call('HDEL', entries_key, 'd' .. member, 't' .. member)
return {DONE, 1}
