-- What an execution was told after an entry that is known.
--
-- KEYS
--   control  stream  capsule:{E:<execution>}:control
-- ARGV
--   after  id of the last entry that is known, or empty
-- RETURNS {DONE, entries: id, data, …}
-- REFUSES nothing
-- USES once, execution

local control_key = KEYS[1]
local after = ARGV[1]

return {DONE, unpack(control_entries(control_key, after))}
