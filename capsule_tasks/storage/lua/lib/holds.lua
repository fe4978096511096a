-- Shared by the scripts that record what a worker holds: its lease, and ids in slices.

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
