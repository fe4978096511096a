-- Removes a run with one status from the index of runs.
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
--   member     of the index to remove
--   idle_ms    a younger entry stays, because its run may be about to have the status
--   before_ms  an entry that was added then or later stays; 0 for any
-- RETURNS {DONE, 1} if it was removed, {DONE, 0} if it stays
-- REFUSES nothing
-- USES common, two_name_index

local all_key, unsent_key, entries_key, agent_key, status_key, both_key = unpack(KEYS)
local session_key = KEYS[7]
local member, idle_ms, before_ms = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])

return drop_from_index(all_key, unsent_key, entries_key, agent_key, status_key, both_key, member,
  idle_ms, before_ms > 0 and before_ms, session_key)
