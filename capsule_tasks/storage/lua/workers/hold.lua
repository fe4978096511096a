-- Records which executions a worker is going to hold, and which it no longer holds.
--
-- KEYS
--   worker  hash  capsule:{W:<incarnation>}
--   held    set   capsule:{W:<incarnation>}:held
-- ARGV
--   token   of the worker's lease
--   ttl_ms  until the record expires
--   count   how many of the ids are held from now on; the others no longer are
--   id...   of executions
-- RETURNS {DONE}
-- REFUSES {LOST} a lease that has lapsed or never existed
-- USES common

local worker_key, held_key = KEYS[1], KEYS[2]
local token, ttl_ms, count = ARGV[1], ARGV[2], tonumber(ARGV[3])
local FIRST = 4

local SLICE = 1000

local got = redis.call('HMGET', worker_key, 'token', 'until')
if got[1] ~= token or tonumber(got[2]) <= clock_us() then return {LOST} end
local function each_slice(command, from, to)
  for first = from, to, SLICE do
    redis.call(command, held_key, unpack(ARGV, first, math.min(first + SLICE - 1, to)))
  end
end
each_slice('SREM', FIRST + count, #ARGV)
each_slice('SADD', FIRST, FIRST + count - 1)
redis.call('PEXPIRE', held_key, ttl_ms)
return {DONE}
