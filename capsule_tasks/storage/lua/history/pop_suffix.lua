-- Removes exactly the given records from the end of a history, or changes nothing.
--
-- KEYS
--   items       list  capsule:{S:<session>}:items
--   history     hash  capsule:{S:<session>}:history
--   operations  hash  capsule:{S:<session>}:operations
-- ARGV
--   operation_id  id of this write
--   age_ms        since the operation was first sent; 0 the first time
--   ttl_ms        until the history expires
--   record...     of the expected end, in order
-- RETURNS {DONE}
-- REFUSES {FORGOTTEN} a repeat that is older than the operation log
--         {ABANDONED} an operation that its caller abandoned before it was done
--         {CONFLICT, record...} another end: the one that was found
-- USES common, operation_log, history

local items_key, history_key, operations_key = KEYS[1], KEYS[2], KEYS[3]
local operation_id, age_ms, ttl_ms = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local FIRST = 4

local now_us = clock_us()
local log = read_log(operations_key, operation_id, age_ms, now_us)
if refuse_repeat(log) then return refuse_repeat(log) end
if log.result then return {DONE} end

local count = #ARGV - FIRST + 1
local found = redis.call('LRANGE', items_key, -count, -1)
local is_expected = #found == count
for index = 1, #found do
  is_expected = is_expected and found[index] == ARGV[FIRST + index - 1]
end
if not is_expected then
  table.insert(found, 1, CONFLICT)
  return found
end

local state = load_history(history_key, items_key)
redis.call('LTRIM', items_key, 0, -count - 1)
state.bytes = state.bytes - size_of(found, 1)
save_history(history_key, items_key, state, now_us, ttl_ms, true)
write_log(operations_key, operation_id, '', log)
return {DONE}
