-- Shared by the scripts that record what a worker holds: its lease, and sets of ids.

local SLICE = 1000 -- one command takes no more

local function is_leased(worker_key, token)
  local got = redis.call('HMGET', worker_key, 'token', 'until')
  return got[1] == token and tonumber(got[2]) > clock_us()
end

local function has_lapsed(worker_key)
  return tonumber(redis.call('HGET', worker_key, 'until') or 0) <= clock_us()
end

local function each_slice(command, key, from, to)
  for first = from, to, SLICE do
    redis.call(command, key, unpack(ARGV, first, math.min(first + SLICE - 1, to)))
  end
end

-- Records the first `count` of the ids in ARGV as held, and the others as no longer held.
local function record_held(worker_key, held_key, token, ttl_ms, count, first)
  if not is_leased(worker_key, token) then return {LOST} end
  each_slice('SREM', held_key, first + count, #ARGV)
  each_slice('SADD', held_key, first, first + count - 1)
  redis.call('PEXPIRE', held_key, ttl_ms)
  return {DONE}
end

-- Some of what a worker held whose lease has lapsed, without the ids in ARGV.
local function read_held(worker_key, held_key, count, first)
  if not has_lapsed(worker_key) then return {HELD} end
  each_slice('SREM', held_key, first, #ARGV)
  return {DONE, unpack(redis.call('SRANDMEMBER', held_key, count))}
end
