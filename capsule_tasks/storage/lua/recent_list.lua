-- Lists what was noted of executions, the latest first, one page.
--
-- KEYS
--   order    zset  capsule:{recent}:order
--   entries  hash  capsule:{recent}:entries
-- ARGV
--   before  microseconds; what was noted before that, or empty
--   count   at most so many
-- RETURNS {DONE, id, noted, record, …}
-- REFUSES nothing
-- USES once

local order_key, entries_key = KEYS[1], KEYS[2]
local before, count = ARGV[1], tonumber(ARGV[2])

local top = before == '' and '+inf' or '(' .. before
local found = redis.call('ZREVRANGEBYSCORE', order_key, top, '-inf', 'WITHSCORES', 'LIMIT', 0, count)
local reply = {DONE}
for place = 1, #found, 2 do
  local record = redis.call('HGET', entries_key, found[place])
  if record then
    reply[#reply + 1] = found[place]
    reply[#reply + 1] = whole(tonumber(found[place + 1]))
    reply[#reply + 1] = record:match('^%d+:%d+:(.*)$')
  end
end
return reply
