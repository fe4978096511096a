-- Lists a session for workers with room and rings them; one that was postponed is due again.
--
-- KEYS
--   wanted  zset  capsule:{wanted:<profile>}
--   marks   hash  capsule:{wanted:<profile>}:marks
-- ARGV
--   session_id  to list
--   ttl_ms      until the list expires
--   channel     to publish on
-- RETURNS {DONE, mark}; each listing has a mark of its own
-- REFUSES nothing
-- USES common

local wanted_key, marks_key = KEYS[1], KEYS[2]
local session_id, ttl_ms, channel = ARGV[1], ARGV[2], ARGV[3]

local COUNTER = '' -- no session has an empty id

local mark = redis.call('HINCRBY', marks_key, COUNTER, 1)
redis.call('HSET', marks_key, session_id, mark)
-- The oldest stays the first: an entry that is due keeps its time.
redis.call('ZADD', wanted_key, 'LT', whole(math.floor(clock_us() / 1000)), session_id)
redis.call('PEXPIRE', wanted_key, ttl_ms)
redis.call('PEXPIRE', marks_key, ttl_ms)
redis.call('PUBLISH', channel, session_id)
return {DONE, mark}
