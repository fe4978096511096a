-- Gives sessions that are wanted to a worker with room, and postpones them, so that other workers
-- are given others, and that no session is lost with a worker that dies.
--
-- KEYS
--   wanted  zset  capsule:{wanted:<profile>}
--   marks   hash  capsule:{wanted:<profile>}:marks
-- ARGV
--   count        of sessions at most
--   postpone_ms  until the sessions are given to another worker, if they are still listed
--   ttl_ms       until the list expires
-- RETURNS {DONE, ms until the next is due or -1, session, mark, …}; those that wait longest first
-- REFUSES nothing
-- USES common

local wanted_key, marks_key = KEYS[1], KEYS[2]
local count, postpone_ms, ttl_ms = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3]

local now_ms = math.floor(clock_us() / 1000)
local due = {}
if count > 0 then
  due = redis.call('ZRANGEBYSCORE', wanted_key, '-inf', whole(now_ms), 'LIMIT', 0, count)
end
local reply = {DONE, -1}
for _, session_id in ipairs(due) do
  redis.call('ZADD', wanted_key, 'XX', whole(now_ms + postpone_ms), session_id)
  reply[#reply + 1] = session_id
  reply[#reply + 1] = redis.call('HGET', marks_key, session_id) or '0'
end
redis.call('PEXPIRE', wanted_key, ttl_ms)
redis.call('PEXPIRE', marks_key, ttl_ms)
local next = redis.call('ZRANGE', wanted_key, 0, 0, 'WITHSCORES')
if next[2] then reply[2] = math.max(0, tonumber(next[2]) - now_ms) end
return reply
