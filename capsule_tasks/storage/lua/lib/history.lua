-- Shared by the scripts of histories: load and save the record, push and move items.
--
-- The record is a hash: `generation` (changes whenever an item is removed, never the same twice),
-- `created` and `updated` (microseconds of Redis's clock), `bytes` (of all items together).

local SLICE = 1000

local function load_history(history_key, items_key)
  local got = redis.call('HMGET', history_key, 'generation', 'created', 'updated', 'bytes')
  local length = redis.call('LLEN', items_key)
  return {
    generation = tonumber(got[1] or 0),
    created = got[2],
    updated = tonumber(got[3] or 0),
    bytes = length > 0 and tonumber(got[4] or 0) or 0,
    length = length,
  }
end

local function save_history(history_key, items_key, state, now_us, ttl_ms, has_removed)
  state.updated = math.max(state.updated + 1, now_us)
  local updated, bytes = whole(state.updated), whole(math.max(state.bytes, 0))
  if has_removed or state.generation == 0 then
    state.generation = math.max(state.generation + 1, now_us)
    redis.call('HSET', history_key, 'updated', updated, 'bytes', bytes,
      'generation', whole(state.generation), 'created', state.created or whole(now_us))
  else
    redis.call('HSET', history_key, 'updated', updated, 'bytes', bytes)
  end
  redis.call('PEXPIRE', history_key, ttl_ms)
  redis.call('PEXPIRE', items_key, ttl_ms)
end

-- Pushes values[from..] in slices: Lua's stack holds some thousands of values.
local function push(key, values, from)
  for first = from, #values, SLICE do
    redis.call('RPUSH', key, unpack(values, first, math.min(first + SLICE - 1, #values)))
  end
end

local function size_of(values, from)
  local bytes = 0
  for index = from, #values do bytes = bytes + #values[index] end
  return bytes
end

-- Adds records to the quarantine; drops the oldest above the maximum.
local function quarantine(quarantine_key, records, max_records, ttl_ms)
  if #records == 0 then return end
  push(quarantine_key, records, 1)
  redis.call('LTRIM', quarantine_key, -max_records, -1)
  redis.call('PEXPIRE', quarantine_key, ttl_ms)
end
