-- Removes a history with its quarantine; once for one operation.
--
-- Records that were popped lately have keys of their own, which a script has to be given: the caller
-- removes them by history_forget.
--
-- KEYS
--   items    list  capsule:{S:<session>}:items
--   history  hash  capsule:{S:<session>}:history
--   batches  hash  capsule:{S:<session>}:batches
--   bad      list  capsule:{S:<session>}:bad
--   popped   zset  capsule:{S:<session>}:popped
-- ARGV
--   operation  id of this write
--   age_ms     since it was first sent; 0 the first time
-- RETURNS {DONE, key...} with the keys of records that were popped before the history was cleared
-- REFUSES {FORGOTTEN} a repeat that the memory does not reach back to
--         {GIVEN_UP} an operation that was settled before it was done
-- USES once

local items_key, history_key, batches_key, bad_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local popped_key = KEYS[5]
local operation, age_ms = ARGV[1], tonumber(ARGV[2])

local memory = recall(batches_key, operation, age_ms, clock_us())
if barred(memory) then return barred(memory) end
local cleared_ms = memory.result or whole(memory.now_ms)
local reply = redis.call('ZRANGEBYSCORE', popped_key, '-inf', cleared_ms)
table.insert(reply, 1, DONE)
if memory.result then return reply end

redis.call('UNLINK', items_key, history_key, bad_key)
remember(batches_key, operation, cleared_ms, memory)
return reply
