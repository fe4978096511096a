-- Reads one chunk of a checkpoint; the checkpoint's time to live begins again.
--
-- KEYS
--   staged  list  capsule:{S:<session>}:checkpoint:<generation>
-- ARGV
--   index   of the chunk
--   ttl_ms  until the checkpoint expires
-- RETURNS {DONE, chunk}
-- REFUSES {MISSING} a chunk that is not there
-- USES common

local staged_key = KEYS[1]
local index, ttl_ms = ARGV[1], ARGV[2]

local chunk = redis.call('LINDEX', staged_key, index)
if not chunk then return {MISSING} end
redis.call('PEXPIRE', staged_key, ttl_ms)
return {DONE, chunk}
