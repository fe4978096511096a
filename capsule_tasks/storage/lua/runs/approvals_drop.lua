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
-- USES common, two_name_index

local all_key, due_key, entries_key, agent_key, tool_key, both_key = unpack(KEYS)
local member, idle_ms = ARGV[1], tonumber(ARGV[2])

return drop_from_index(all_key, due_key, entries_key, agent_key, tool_key, both_key, member,
  idle_ms)
