-- Removes a history with its quarantine.
--
-- Records that were popped lately have keys of their own, and a script has to be given each key:
-- the caller removes them by history/forget.
--
-- KEYS
--   items       list  capsule:{S:<session>}:items
--   history     hash  capsule:{S:<session>}:history
--   operations  hash  capsule:{S:<session>}:operations
--   quarantine  list  capsule:{S:<session>}:quarantine
--   popped      zset  capsule:{S:<session>}:popped
-- ARGV
--   operation_id  id of this write
--   age_ms        since the operation was first sent; 0 the first time
-- RETURNS {DONE, key...} with the keys of records that were popped before the history was cleared
-- REFUSES {FORGOTTEN} a repeat that is older than the operation log
--         {ABANDONED} an operation that its caller abandoned before it was done
-- USES common, operation_log

local items_key, history_key, operations_key, quarantine_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local popped_key = KEYS[5]
local operation_id, age_ms = ARGV[1], tonumber(ARGV[2])

local log = read_log(operations_key, operation_id, age_ms, clock_us())
if refuse_repeat(log) then return refuse_repeat(log) end
local cleared_ms = log.result or whole(log.now_ms)
local reply = redis.call('ZRANGEBYSCORE', popped_key, '-inf', cleared_ms)
table.insert(reply, 1, DONE)
if log.result then return reply end

redis.call('UNLINK', items_key, history_key, quarantine_key)
write_log(operations_key, operation_id, cleared_ms, log)
return reply
