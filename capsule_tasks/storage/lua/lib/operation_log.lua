-- The operation log: an operation that is in the log is not done again when it is repeated.
--
-- The log is a hash: operation id -> result, `#<n>` -> `<ms>:<operation id>` in the order of
-- writing, `#first` and `#last` (the range of n), `#trimmed` (when the newest trimmed operation
-- was done). Entries stay for ten minutes, up to a maximum number; the hash expires ten minutes
-- after the last write. A repeat that is older than the log reaches back is answered FORGOTTEN and
-- never done again. The result `!` marks an operation that its caller abandoned before it was
-- done.

local LOG_MS = 600000
local LOG_TTL = '600000' -- the same; a number would be spelled out at each write
local ABANDONED_RESULT = '!'
local MIN_ENTRIES = 64
local MAX_ENTRIES = 10000
local TRIM_EVERY = 16
local TRIM_BATCH = 64

-- The log's entry of this operation; `result` is nil if it is not in the log.
local function read_log(key, operation_id, age_ms, now_us)
  local got = redis.call('HMGET', key, operation_id, '#last', '#first', '#trimmed')
  local log = {
    result = got[1] or nil,
    is_abandoned = got[1] == ABANDONED_RESULT,
    last = tonumber(got[2] or 0),
    first = tonumber(got[3] or 1),
    trimmed_ms = tonumber(got[4] or 0),
    now_ms = math.floor(now_us / 1000),
  }
  if log.is_abandoned then log.result = nil end
  -- One second more: the clocks of client and server drift apart by less within ten minutes.
  local started_ms = log.now_ms - age_ms - 1000
  log.is_forgotten = not log.result and age_ms > 0
    and (age_ms >= LOG_MS or started_ms <= log.trimmed_ms)
  return log
end

-- The reply to a repeat that must not be done: its caller abandoned the operation, or the log does
-- not reach back to it. For the first `call_script` goes on under another id, for the second it
-- raises StorageForgotten.
local function refuse_repeat(log)
  if log.is_abandoned then return {ABANDONED} end
  if log.is_forgotten then return {FORGOTTEN} end
  return nil
end

-- Removes entries from the front that are old, or more than the maximum.
local function trim_log(key, log, last)
  local first, removed, trimmed_ms = log.first, {}, nil
  for _ = 1, TRIM_BATCH do
    if last - first < MIN_ENTRIES then break end
    local entry = redis.call('HGET', key, '#' .. first)
    if entry then
      local done_ms, operation_id = entry:match('^(%d+):(.*)$')
      local is_young = log.now_ms - tonumber(done_ms) < LOG_MS
      if is_young and last - first < MAX_ENTRIES then break end
      trimmed_ms = done_ms
      removed[#removed + 1] = operation_id
      removed[#removed + 1] = '#' .. first
    end
    first = first + 1
  end
  if #removed == 0 then return end
  redis.call('HDEL', key, unpack(removed))
  redis.call('HSET', key, '#first', first, '#trimmed', trimmed_ms)
end

local function write_log(key, operation_id, result, log)
  local last = log.last + 1
  local number, entry = whole(last), whole(log.now_ms) .. ':' .. operation_id
  redis.call('HSET', key, operation_id, result, '#last', number, '#' .. number, entry)
  -- Trimming now and then is enough, and costs most writes nothing.
  if last % TRIM_EVERY == 0 then trim_log(key, log, last) end
  redis.call('PEXPIRE', key, LOG_TTL)
end
