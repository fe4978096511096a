-- Appends one batch to a history; once, however often it is called with one operation.
--
-- KEYS
--   items    list  capsule:{S:<session>}:items
--   history  hash  capsule:{S:<session>}:history
--   batches  hash  capsule:{S:<session>}:batches
-- ARGV
--   operation  id of this write
--   age_ms     since it was first sent; 0 the first time
--   ttl_ms     until the history expires
--   max_items  that the history may hold
--   max_bytes  that its items may have together
--   record...  the batch, in order
-- RETURNS {DONE}
-- REFUSES {FORGOTTEN} a repeat that the memory does not reach back to
--         {GIVEN_UP} an operation that was settled before it was done
--         {FULL, length, bytes} a batch that does not fit
-- USES once, history

local items_key, history_key, batches_key = KEYS[1], KEYS[2], KEYS[3]
local operation, age_ms, ttl_ms = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local max_items, max_bytes = tonumber(ARGV[4]), tonumber(ARGV[5])
local FIRST = 6

local now_us = clock_us()
local memory = recall(batches_key, operation, age_ms, now_us)
if barred(memory) then return barred(memory) end
if memory.result then return {DONE} end

local state = load_history(history_key, items_key)
local count = #ARGV - FIRST + 1
local bytes = size_of(ARGV, FIRST)
if state.length + count > max_items or state.bytes + bytes > max_bytes then
  return {FULL, state.length, state.bytes}
end

push(items_key, ARGV, FIRST)
state.bytes = state.bytes + bytes
save_history(history_key, items_key, state, now_us, ttl_ms, false)
remember(batches_key, operation, '', memory)
return {DONE}
