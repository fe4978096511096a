-- Ends an operation whose caller has left: it was done already, or it never will be.
--
-- A command that was sent and given up may still wait in a socket. Taking its operation's place
-- in the memory makes it change nothing when it is read.
--
-- KEYS
--   batches  hash  capsule:{S:<session>}:batches
-- ARGV
--   operation  id of the write that was given up
--   age_ms     since it was first sent
-- RETURNS {DONE, 1} if it was done, {DONE, 0} if it never will be
-- REFUSES {FORGOTTEN} an operation that the memory does not reach back to
-- USES once

local batches_key = KEYS[1]
local operation, age_ms = ARGV[1], tonumber(ARGV[2])

local memory = recall(batches_key, operation, age_ms, clock_us())
if memory.is_given_up then return {DONE, 0} end
if memory.result then return {DONE, 1} end
if memory.is_forgotten then return {FORGOTTEN} end
remember(batches_key, operation, GIVEN_UP_RESULT, memory)
return {DONE, 0}
