-- Abandons an operation whose caller left: it was done already, or it will never be done.
--
-- A command that was sent may still wait in a socket. The entry in the operation log makes it
-- change nothing when Redis reads it.
--
-- KEYS
--   operations  hash  capsule:{S:<session>}:operations
-- ARGV
--   operation_id  id of the write to abandon
--   age_ms        since the operation was first sent
-- RETURNS {DONE, 1} if it was done, {DONE, 0} if it will never be
-- REFUSES {FORGOTTEN} an operation that is older than the operation log
-- USES common, operation_log

local operations_key = KEYS[1]
local operation_id, age_ms = ARGV[1], tonumber(ARGV[2])

local log = read_log(operations_key, operation_id, age_ms, clock_us())
if log.is_abandoned then return {DONE, 0} end
if log.result then return {DONE, 1} end
if log.is_forgotten then return {FORGOTTEN} end
write_log(operations_key, operation_id, ABANDONED_RESULT, log)
return {DONE, 0}
