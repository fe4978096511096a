-- Takes exactly the given records off the end of a history, or changes nothing.
--
-- KEYS
--   items    list  capsule:{S:<session>}:items
--   history  hash  capsule:{S:<session>}:history
--   batches  hash  capsule:{S:<session>}:batches
-- ARGV
--   operation  id of this write
--   age_ms     since it was first sent; 0 the first time
--   ttl_ms     until the history expires
--   record...  the end that is expected, in order
-- RETURNS {DONE}
-- REFUSES {FORGOTTEN} a repeat that the memory does not reach back to
--         {GIVEN_UP} an operation that was settled before it was done
--         {CONFLICT, record...} another end: the one that was found
-- USES once, history

local items_key, history_key, batches_key = KEYS[1], KEYS[2], KEYS[3]
local operation, age_ms, ttl_ms = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local FIRST = 4

local now_us = clock_us()
local memory = recall(batches_key, operation, age_ms, now_us)
if barred(memory) then return barred(memory) end
if memory.result then return {DONE} end

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
remember(batches_key, operation, '', memory)
return {DONE}
