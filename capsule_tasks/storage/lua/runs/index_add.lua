-- Adds runs of one agent and session to the index of runs, before they have a status.
--
-- KEYS
--   all      zset  capsule:{runs}:all
--   unsent   zset  capsule:{runs}:unsent
--   entries  hash  capsule:{runs}:entries
--   agent    zset  capsule:{runs}:agent:<agent>
--   status   zset  capsule:{runs}:status:<status>
--   both     zset  capsule:{runs}:both:<agent>:<status>
--   session  zset  capsule:{runs}:session:<session>
-- ARGV
--   ttl_ms   until the index expires
--   part...  member, details, ms until its message should be sent (0: it needs none), and so on
-- RETURNS {DONE, ms of Redis's clock}
-- REFUSES nothing
-- USES common, two_name_index

local all_key, unsent_key, entries_key, agent_key, status_key, both_key = unpack(KEYS)
local session_key = KEYS[7]
local ttl_ms = ARGV[1]
local FIRST = 2

return add_to_index(all_key, unsent_key, entries_key, agent_key, status_key, both_key, ttl_ms,
  FIRST, 'LT', session_key)
