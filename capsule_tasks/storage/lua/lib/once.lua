-- An operation that was done is remembered, so that repeating it changes nothing.
--
-- The memory is a hash: operation -> result, `#<n>` -> `<ms>:<operation>` in the order of writing,
-- `#first` and `#last` (the range of n), `#forgot` (when the newest forgotten one was done). It
-- keeps ten minutes, up to a cap, and lapses ten minutes after the last write. A repeat that says
-- it is older than the memory reaches is answered FORGOTTEN, never done again. The result `!` stands
-- for an operation that was given up before it was done.

local MEMORY_MS = 600000
local MEMORY_TTL = '600000' -- the same; a number would be spelled out at each write
local GIVEN_UP_RESULT = '!'
local KEEP_AT_LEAST = 64
local KEEP_AT_MOST = 10000
local EVICT_EVERY = 16
local EVICT_AT_ONCE = 64

local function whole(number)
  return string.format('%d', number)
end

local function clock_us()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000000 + tonumber(time[2])
end

-- Returns the memory around this operation; `result` is nil if it is not known.
local function recall(key, operation, age_ms, now_us)
  local got = redis.call('HMGET', key, operation, '#last', '#first', '#forgot')
  local memory = {
    result = got[1] or nil,
    is_given_up = got[1] == GIVEN_UP_RESULT,
    last = tonumber(got[2] or 0),
    first = tonumber(got[3] or 1),
    forgot_ms = tonumber(got[4] or 0),
    now_ms = math.floor(now_us / 1000),
  }
  if memory.is_given_up then memory.result = nil end
  -- The clocks of client and server tick apart by less than the second that is added here.
  local begun_ms = memory.now_ms - age_ms - 1000
  memory.is_forgotten = not memory.result and age_ms > 0
    and (age_ms >= MEMORY_MS or begun_ms <= memory.forgot_ms)
  return memory
end

-- The reply to an operation that must not be done: its caller gave it up, or it is too old to be
-- known. `perform` goes on under another name in the first case, and raises in the second.
local function barred(memory)
  if memory.is_given_up then return {GIVEN_UP} end
  if memory.is_forgotten then return {FORGOTTEN} end
  return nil
end

-- Removes what is old, or too much, from the front.
local function forget(key, memory, last)
  local first, gone, forgot_ms = memory.first, {}, nil
  for _ = 1, EVICT_AT_ONCE do
    if last - first < KEEP_AT_LEAST then break end
    local entry = redis.call('HGET', key, '#' .. first)
    if entry then
      local done_ms, known = entry:match('^(%d+):(.*)$')
      local is_young = memory.now_ms - tonumber(done_ms) < MEMORY_MS
      if is_young and last - first < KEEP_AT_MOST then break end
      forgot_ms = done_ms
      gone[#gone + 1] = known
      gone[#gone + 1] = '#' .. first
    end
    first = first + 1
  end
  if #gone == 0 then return end
  redis.call('HDEL', key, unpack(gone))
  redis.call('HSET', key, '#first', first, '#forgot', forgot_ms)
end

local function remember(key, operation, result, memory)
  local last = memory.last + 1
  local number, entry = whole(last), whole(memory.now_ms) .. ':' .. operation
  redis.call('HSET', key, operation, result, '#last', number, '#' .. number, entry)
  -- Now and then is enough, and spares most writes the look.
  if last % EVICT_EVERY == 0 then forget(key, memory, last) end
  redis.call('PEXPIRE', key, MEMORY_TTL)
end
