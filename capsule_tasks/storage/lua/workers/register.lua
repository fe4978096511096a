-- Registers a worker in the index of workers, removes others, and lists those that are due.
--
-- KEYS
--   workers  zset  capsule:workers
-- ARGV
--   worker          incarnation to register, or empty
--   lease_ms        until the worker should be checked
--   ttl_ms          until the index expires
--   max_due         how many due workers are listed
--   incarnation...  to remove: they hold nothing any more
-- RETURNS {DONE, ms until the next is due or -1, incarnations that are due…}
-- REFUSES nothing
-- USES common

local workers_key = KEYS[1]
local worker, lease_ms, ttl_ms, max_due = ARGV[1], tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4])
local FIRST = 5

local now_ms = math.floor(clock_us() / 1000)
for n = FIRST, #ARGV do redis.call('ZREM', workers_key, ARGV[n]) end
if worker ~= '' then
  redis.call('ZADD', workers_key, whole(now_ms + lease_ms), worker)
  redis.call('PEXPIRE', workers_key, ttl_ms)
end
local due = redis.call('ZRANGEBYSCORE', workers_key, '-inf', whole(now_ms), 'LIMIT', 0, max_due)
local next = redis.call('ZRANGEBYSCORE', workers_key, '(' .. whole(now_ms), '+inf',
  'WITHSCORES', 'LIMIT', 0, 1)
local next_ms = next[2] and math.max(0, tonumber(next[2]) - now_ms) or -1
return {DONE, next_ms, unpack(due)}
