-- Takes the last item off a history, whatever it is; once for one operation.
--
-- Whether a record is corrupt only its reader can tell. A reader who found one comes back with
-- the operation that took it, and it goes to quarantine in the same step as the next is taken.
--
-- A record that was taken is kept for repeats, under a key of its own that expires after ten
-- minutes. The memory of operations may live longer, so it holds no record.
--
-- KEYS
--   items    list  capsule:{S:<session>}:items
--   history  hash  capsule:{S:<session>}:history
--   batches  hash  capsule:{S:<session>}:batches
--   bad      list  capsule:{S:<session>}:bad
--   popped   zset  capsule:{S:<session>}:popped
--   taken    string  capsule:{S:<session>}:popped:<operation>
--   corrupt  string  capsule:{S:<session>}:popped:<operation>
-- ARGV
--   operation  id of this write
--   age_ms     since it was first sent; 0 the first time
--   ttl_ms     until the history expires
--   corrupt_by operation that took a corrupt record; empty if there is none
--   keep_bad   records that the quarantine holds at most
--   guard...   none; or how all sealed records begin, and then how those do that can be opened
-- RETURNS {DONE, record} or, where there was none, {DONE}; an empty record stands for one that is in
--         quarantine by now
-- REFUSES {FORGOTTEN} a repeat that the memory does not reach back to, or whose record has expired
--         {GIVEN_UP} an operation that was settled before it was done
--         {CONFLICT, record} a sealed record that the caller cannot open
-- USES once, history

local items_key, history_key, batches_key, bad_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local popped_key, taken_key, corrupt_key = KEYS[5], KEYS[6], KEYS[7]
local operation, age_ms, ttl_ms = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local corrupt_by, keep_bad = ARGV[4], tonumber(ARGV[5])
local FIRST = 6

local MOST_POPPED = 10000

-- The reply to a repeat. The result is the time of the pop, or `-` once the record is in quarantine.
local function known(result)
  if result == '-' then return {DONE, ''} end
  local record = redis.call('GET', taken_key)
  if record then return {DONE, record} end
  -- A history that was cleared since the pop has nothing to give.
  local created = redis.call('HGET', history_key, 'created')
  if not created or tonumber(created) > tonumber(result) then return {DONE} end
  return {FORGOTTEN}
end

local function keep_for_repeats(record, now_ms)
  redis.call('SET', taken_key, record, 'PX', MEMORY_TTL)
  redis.call('ZADD', popped_key, whole(now_ms), taken_key)
  redis.call('ZREMRANGEBYSCORE', popped_key, '-inf', '(' .. whole(now_ms - MEMORY_MS))
  redis.call('ZREMRANGEBYRANK', popped_key, 0, -MOST_POPPED - 1)
  redis.call('PEXPIRE', popped_key, MEMORY_TTL)
end

local function may_take(record)
  local function begins(prefix) return record:sub(1, #prefix) == prefix end
  if not ARGV[FIRST] or not begins(ARGV[FIRST]) then return true end
  for index = FIRST + 1, #ARGV do
    if begins(ARGV[index]) then return true end
  end
  return false
end

local now_us = clock_us()
local memory = recall(batches_key, operation, age_ms, now_us)
if barred(memory) then return barred(memory) end
if memory.result then return known(memory.result) end

if corrupt_by ~= '' then
  local record = redis.call('GET', corrupt_key)
  if record then
    -- A write that needs no memory comes first: a server that is out of it then lets the record
    -- move, instead of losing it when its key expires.
    redis.call('PEXPIRE', corrupt_key, MEMORY_TTL)
    quarantine(bad_key, {record}, keep_bad, ttl_ms)
    redis.call('UNLINK', corrupt_key)
    redis.call('ZREM', popped_key, corrupt_key)
    redis.call('HSET', batches_key, corrupt_by, '-')
  end
end

local state = load_history(history_key, items_key)
local record = redis.call('LINDEX', items_key, -1)
if not record then return {DONE} end
if not may_take(record) then return {CONFLICT, record} end

redis.call('RPOP', items_key)
state.bytes = state.bytes - #record
save_history(history_key, items_key, state, now_us, ttl_ms, true)
keep_for_repeats(record, memory.now_ms)
remember(batches_key, operation, whole(now_us), memory)
return {DONE, record}
