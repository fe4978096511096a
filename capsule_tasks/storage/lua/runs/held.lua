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

if not has_lapsed(worker_key) then return {HELD} end
each_slice('SREM', runs_key, FIRST, #ARGV)
return {DONE, unpack(redis.call('SRANDMEMBER', runs_key, count))}
