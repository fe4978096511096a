-- Counts the processes that one delivered message has cost, on whichever worker.
--
-- KEYS
--   losses  set  capsule:{E:<execution>}:losses:<attempt>
-- ARGV
--   keep_ms  until it is forgotten, from the last one on
--   loss     its id, so that telling it twice counts once
-- RETURNS {DONE, how many}
-- REFUSES nothing
-- USES once

local losses_key = KEYS[1]
local keep_ms, loss = tonumber(ARGV[1]), ARGV[2]

redis.call('SADD', losses_key, loss)
redis.call('PEXPIRE', losses_key, whole(keep_ms))
return {DONE, redis.call('SCARD', losses_key)}
