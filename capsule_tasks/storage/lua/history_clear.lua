-- Removes a history with its quarantine; once for one operation.
--
-- KEYS
--   items    list  capsule:{S:<session>}:items
--   history  hash  capsule:{S:<session>}:history
--   batches  hash  capsule:{S:<session>}:batches
--   bad      list  capsule:{S:<session>}:bad
-- ARGV
--   operation  id of this write
--   age_ms     since it was first sent; 0 the first time
-- RETURNS {DONE}
-- REFUSES {FORGOTTEN} a repeat that the memory does not reach back to
--         {GIVEN_UP} an operation that was settled before it was done
-- USES once

local items_key, history_key, batches_key, bad_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local operation, age_ms = ARGV[1], tonumber(ARGV[2])

local memory = recall(batches_key, operation, age_ms, clock_us())
if barred(memory) then return barred(memory) end
if memory.result then return {DONE} end

redis.call('UNLINK', items_key, history_key, bad_key)
remember(batches_key, operation, '', memory)
return {DONE}
