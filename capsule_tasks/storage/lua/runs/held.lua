-- Reads holds of an owner with a lapsed lease, after removing those that were seen to.
--
-- KEYS
--   worker  hash  capsule:{W:<incarnation>}
--   runs    set   capsule:{W:<incarnation>}:runs
-- ARGV
--   count    of holds at most
--   hold...  that were seen to
-- RETURNS {DONE, holds…}
-- REFUSES {HELD} a lease that has not lapsed
-- USES common, holds

local worker_key, runs_key = KEYS[1], KEYS[2]
local count = tonumber(ARGV[1])
local FIRST = 2

return read_held(worker_key, runs_key, count, FIRST)
