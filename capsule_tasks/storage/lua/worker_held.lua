-- What a worker held whose lease has lapsed; what was seen to is taken off first.
--
-- KEYS
--   worker  hash  capsule:{W:<incarnation>}
--   held    set   capsule:{W:<incarnation>}:held
-- ARGV
--   count   at most so many
--   id...  ids of executions that were seen to
-- RETURNS {DONE, ids…}
-- REFUSES {HELD} a lease that has not lapsed
-- USES once

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
