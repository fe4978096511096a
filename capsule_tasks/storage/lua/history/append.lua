-- Appends a batch of items to a history.
--
-- KEYS
--   items       list  capsule:{S:<session>}:items
--   history     hash  capsule:{S:<session>}:history
--   operations  hash  capsule:{S:<session>}:operations
-- ARGV
--   operation_id  id of this write
--   age_ms        since the operation was first sent; 0 the first time
--   ttl_ms        until the history expires
--   max_items     of the history at most
--   max_bytes     of all its items together at most
--   record...     of the batch, in order
-- RETURNS {DONE}
-- REFUSES {FORGOTTEN} a repeat that is older than the operation log
--         {ABANDONED} an operation that its caller abandoned before it was done
--         {FULL, length, bytes} a batch that does not fit
-- USES common, operation_log, history

local items_key, history_key, operations_key = KEYS[1], KEYS[2], KEYS[3]
local operation_id, age_ms, ttl_ms = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local max_items, max_bytes = tonumber(ARGV[4]), tonumber(ARGV[5])
local FIRST = 6

local now_us = clock_us()
local log = read_log(operations_key, operation_id, age_ms, now_us)
if refuse_repeat(log) then return refuse_repeat(log) end
if log.result then return {DONE} end

local state = load_history(history_key, items_key)
local count = #ARGV - FIRST + 1
local bytes = size_of(ARGV, FIRST)
if state.length + count > max_items or state.bytes + bytes > max_bytes then
  return {FULL, state.length, state.bytes}
end

push(items_key, ARGV, FIRST)
state.bytes = state.bytes + bytes
save_history(history_key, items_key, state, now_us, ttl_ms, false)
write_log(operations_key, operation_id, '', log)
return {DONE}
