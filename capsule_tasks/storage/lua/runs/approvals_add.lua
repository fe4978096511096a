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
-- USES common, two_name_index

local all_key, due_key, entries_key, agent_key, tool_key, both_key = unpack(KEYS)
local ttl_ms = ARGV[1]
local FIRST = 2

return add_to_index(all_key, due_key, entries_key, agent_key, tool_key, both_key, ttl_ms, FIRST,
  'NX')
