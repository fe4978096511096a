-- Reads executions that a worker with a lapsed lease held, after removing those that were reaped.
--
-- KEYS
--   worker  hash  capsule:{W:<incarnation>}
--   held    set   capsule:{W:<incarnation>}:held
-- ARGV
--   count  of executions at most
--   id...  of executions that were reaped
-- RETURNS {DONE, ids…}
-- REFUSES {HELD} a lease that has not lapsed
-- USES common

local worker_key, held_key = KEYS[1], KEYS[2]
local count = tonumber(ARGV[1])
local FIRST = 2

local SLICE = 1000

local till = tonumber(redis.call('HGET', worker_key, 'until') or 0)
if till > clock_us() then return {HELD} end
for first = FIRST, #ARGV, SLICE do
  redis.call('SREM', held_key, unpack(ARGV, first, math.min(first + SLICE - 1, #ARGV)))
end
return {DONE, unpack(redis.call('SRANDMEMBER', held_key, count))}
