-- Reads commands of an execution after one that is known.
--
-- KEYS
--   control  stream  capsule:{E:<execution>}:control
-- ARGV
--   after  id of the last known command, or empty
-- RETURNS {DONE, entries: id, data, …}
-- REFUSES nothing
-- USES common, execution

local control_key = KEYS[1]
local after = ARGV[1]

return {DONE, unpack(control_entries(control_key, after))}
