-- Notes what a worker is going to hold, and what it no longer does.
--
-- KEYS
--   worker  hash  capsule:{W:<incarnation>}
--   held    set   capsule:{W:<incarnation>}:held
-- ARGV
--   token    of the worker's lease
--   keep_ms  until the note is forgotten
--   count    how many of the ids are to be held; the others no longer are
--   id...    of executions
-- RETURNS {DONE}
-- REFUSES {LOST} a lease that has lapsed, or never was
-- USES once

local worker_key, held_key = KEYS[1], KEYS[2]
local token, keep_ms, count = ARGV[1], ARGV[2], tonumber(ARGV[3])
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
redis.call('PEXPIRE', held_key, keep_ms)
return {DONE}
