-- Reads a page of the index of recent executions, latest first.
--
-- KEYS
--   order    zset  capsule:{recent}:order
--   entries  hash  capsule:{recent}:entries
-- ARGV
--   before  microseconds: only those recorded before that; or empty
--   count   of executions at most
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
  local record = redis.call('HGET', entries_key, found[n])
  if record then
    reply[#reply + 1] = found[n]
    reply[#reply + 1] = whole(tonumber(found[n + 1]))
    reply[#reply + 1] = record:match('^%d+:%d+:(.*)$')
  end
end
return reply
