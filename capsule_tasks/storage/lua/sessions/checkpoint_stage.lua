-- Appends a chunk of a checkpoint to a list of its own, which no manifest names yet.
--
-- A writer whose attempt broke off begins again with the first chunk: the chunks that are there stay.
--
-- KEYS
--   staged  list  capsule:{S:<session>}:checkpoint:<generation>
-- ARGV
--   index   of the chunk in the checkpoint
--   ttl_ms  until an abandoned list expires
--   chunk   opaque
-- RETURNS {DONE}
-- REFUSES {CONFLICT, length} a list that lacks chunks before this one
-- USES common

local staged_key = KEYS[1]
local index, ttl_ms, chunk = tonumber(ARGV[1]), ARGV[2], ARGV[3]

local length = redis.call('LLEN', staged_key)
if length > index then return {DONE} end
if length < index then return {CONFLICT, length} end
redis.call('RPUSH', staged_key, chunk)
redis.call('PEXPIRE', staged_key, ttl_ms)
return {DONE}
