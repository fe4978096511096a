-- Keeps the index of workers: notes one and forgets others, and lists whose time has passed.
--
-- KEYS
--   workers  zset  capsule:workers
-- ARGV
--   worker     incarnation that lives, or empty
--   lease_ms   until it should be looked at
--   keep_ms    until the index is forgotten
--   most       how many are listed
--   incarnation...  that hold nothing any more
-- RETURNS {DONE, ms until the next is due or -1, incarnations that are due…}
-- REFUSES nothing
-- USES once

local workers_key = KEYS[1]
local worker, lease_ms, keep_ms, most = ARGV[1], tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4])
local FIRST = 5

local now_ms = math.floor(clock_us() / 1000)
for place = FIRST, #ARGV do redis.call('ZREM', workers_key, ARGV[place]) end
if worker ~= '' then
  redis.call('ZADD', workers_key, whole(now_ms + lease_ms), worker)
  redis.call('PEXPIRE', workers_key, keep_ms)
end
local due = redis.call('ZRANGEBYSCORE', workers_key, '-inf', whole(now_ms), 'LIMIT', 0, most)
local next = redis.call('ZRANGEBYSCORE', workers_key, '(' .. whole(now_ms), '+inf',
  'WITHSCORES', 'LIMIT', 0, 1)
local next_ms = next[2] and math.max(0, tonumber(next[2]) - now_ms) or -1
return {DONE, next_ms, unpack(due)}
