-- Reads a page of the index of sessions, the latest first.
--
-- KEYS
--   order    zset  capsule:{sessions}:order
--   entries  hash  capsule:{sessions}:entries
-- ARGV
--   before  microseconds: only those recorded before that; or empty
--   count   of sessions at most
-- RETURNS {DONE, id, recorded us, record, …}
-- REFUSES nothing
-- USES common

local order_key, entries_key = KEYS[1], KEYS[2]
local before, count = ARGV[1], tonumber(ARGV[2])

local top = before == '' and '+inf' or '(' .. before
local found = redis.call('ZREVRANGEBYSCORE', order_key, top, '-inf', 'WITHSCORES',
  'LIMIT', 0, count)
local reply = {DONE}
for n = 1, #found, 2 do
  reply[#reply + 1] = found[n]
  reply[#reply + 1] = whole(tonumber(found[n + 1]))
  reply[#reply + 1] = redis.call('HGET', entries_key, found[n]) or ''
end
return reply
