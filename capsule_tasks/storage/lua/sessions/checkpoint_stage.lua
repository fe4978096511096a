-- Appends a chunk of a checkpoint to a list of its own, which no manifest names yet.
--
-- KEYS
--   staged  list  capsule:{S:<session>}:checkpoint:<generation>
-- ARGV
--   index   of the chunk in the checkpoint
--   ttl_ms  until an abandoned list expires
--   chunk   opaque
-- RETURNS {DONE}
-- REFUSES {CONFLICT, length} a list whose length does not fit the index
-- USES common

local staged_key = KEYS[1]
local index, ttl_ms, chunk = tonumber(ARGV[1]), ARGV[2], ARGV[3]

local length = redis.call('LLEN', staged_key)
if length == index + 1 then return {DONE} end  -- the reply to the first call was lost
if length ~= index then return {CONFLICT, length} end
redis.call('RPUSH', staged_key, chunk)
redis.call('PEXPIRE', staged_key, ttl_ms)
return {DONE}
