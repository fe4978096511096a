-- Counts a child process that a task message has cost, on any worker.
--
-- KEYS
--   losses  set  capsule:{E:<execution>}:losses:<attempt>
-- ARGV
--   ttl_ms  until the losses expire, after the last one
--   loss    its id, so that a repeat counts once
-- RETURNS {DONE, how many}
-- REFUSES nothing
-- USES common

local losses_key = KEYS[1]
local ttl_ms, loss = tonumber(ARGV[1]), ARGV[2]

redis.call('SADD', losses_key, loss)
redis.call('PEXPIRE', losses_key, whole(ttl_ms))
return {DONE, redis.call('SCARD', losses_key)}
