-- Removes the last record of a history and returns it, readable or not.
--
-- Only the reader can tell whether a record is corrupt. A reader that finds one calls again with
-- the operation that took it: the record goes to quarantine in the same step as the next one is
-- taken.
--
-- A taken record is stored for repeats under a key of its own that expires after ten minutes. The
-- operation log may live longer, so it holds no record.
--
-- KEYS
--   items       list    capsule:{S:<session>}:items
--   history     hash    capsule:{S:<session>}:history
--   operations  hash    capsule:{S:<session>}:operations
--   quarantine  list    capsule:{S:<session>}:quarantine
--   popped      zset    capsule:{S:<session>}:popped
--   taken       string  capsule:{S:<session>}:popped:<operation>
--   corrupt     string  capsule:{S:<session>}:popped:<operation>
-- ARGV
--   operation_id       id of this write
--   age_ms             since the operation was first sent; 0 the first time
--   ttl_ms             until the history expires
--   corrupt_operation  operation that took a corrupt record, or empty
--   max_quarantined    of the quarantine at most
--   guard...           none; or the prefix of sealed records, then those that the caller can open
-- RETURNS {DONE, record}, or {DONE} if there was none; an empty record stands for one that is in
--         quarantine by now
-- REFUSES {FORGOTTEN} a repeat that is older than the operation log, or whose record expired
--         {ABANDONED} an operation that its caller abandoned before it was done
--         {CONFLICT, record} a sealed record that the caller cannot open
-- USES common, operation_log, history

local items_key, history_key, operations_key, quarantine_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local popped_key, taken_key, corrupt_key = KEYS[5], KEYS[6], KEYS[7]
local operation_id, age_ms, ttl_ms = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local corrupt_operation, max_quarantined = ARGV[4], tonumber(ARGV[5])
local FIRST = 6

local MAX_POPPED = 10000

-- The reply to a repeat. The log has the time of the pop, or `-` if the record is in quarantine.
local function known(result)
  if result == '-' then return {DONE, ''} end
  local record = redis.call('GET', taken_key)
  if record then return {DONE, record} end
  -- The history was cleared since the pop.
  local created = redis.call('HGET', history_key, 'created')
  if not created or tonumber(created) > tonumber(result) then return {DONE} end
  return {FORGOTTEN}
end

local function store_for_repeats(record, now_ms)
  redis.call('SET', taken_key, record, 'PX', LOG_TTL)
  redis.call('ZADD', popped_key, whole(now_ms), taken_key)
  redis.call('ZREMRANGEBYSCORE', popped_key, '-inf', '(' .. whole(now_ms - LOG_MS))
  redis.call('ZREMRANGEBYRANK', popped_key, 0, -MAX_POPPED - 1)
  redis.call('PEXPIRE', popped_key, LOG_TTL)
end

local function may_take(record)
  local function starts_with(prefix) return record:sub(1, #prefix) == prefix end
  if not ARGV[FIRST] or not starts_with(ARGV[FIRST]) then return true end
  for index = FIRST + 1, #ARGV do
    if starts_with(ARGV[index]) then return true end
  end
  return false
end

local now_us = clock_us()
local log = read_log(operations_key, operation_id, age_ms, now_us)
if refuse_repeat(log) then return refuse_repeat(log) end
if log.result then return known(log.result) end

if corrupt_operation ~= '' then
  local record = redis.call('GET', corrupt_key)
  if record then
    -- A server that is out of memory refuses a script whose first write needs memory. This one
    -- needs none, so the record is moved and not lost when its key expires.
    redis.call('PEXPIRE', corrupt_key, LOG_TTL)
    quarantine(quarantine_key, {record}, max_quarantined, ttl_ms)
    redis.call('UNLINK', corrupt_key)
    redis.call('ZREM', popped_key, corrupt_key)
    redis.call('HSET', operations_key, corrupt_operation, '-')
  end
end

local state = load_history(history_key, items_key)
local record = redis.call('LINDEX', items_key, -1)
if not record then return {DONE} end
if not may_take(record) then return {CONFLICT, record} end

redis.call('RPOP', items_key)
state.bytes = state.bytes - #record
save_history(history_key, items_key, state, now_us, ttl_ms, true)
store_for_repeats(record, log.now_ms)
write_log(operations_key, operation_id, whole(now_us), log)
return {DONE, record}
