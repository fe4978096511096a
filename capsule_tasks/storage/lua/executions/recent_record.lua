-- Records the state of executions in the index of recent ones; drops the oldest above a maximum.
--
-- KEYS
--   order    zset  capsule:{recent}:order
--   entries  hash  capsule:{recent}:entries
-- ARGV
--   max_entries  of the index
--   ttl_ms       until the index expires, after the last write
--   channel      to publish on
--   update...    id, attempt, record, …; one of an older attempt changes nothing
-- RETURNS {DONE}
-- REFUSES nothing
-- USES common, index

local order_key, entries_key = KEYS[1], KEYS[2]
local max_entries, ttl_ms, channel = tonumber(ARGV[1]), ARGV[2], ARGV[3]
local FIRST = 4

local now_us = next_us(order_key)
for n = FIRST, #ARGV, 3 do
  local id, attempt, record = ARGV[n], ARGV[n + 1], ARGV[n + 2]
  local known = redis.call('HGET', entries_key, id)
  local known_attempt = known and tonumber(known:match('^(%d+):')) or -1
  if tonumber(attempt) >= known_attempt then
    local entry = attempt .. ':' .. whole(now_us) .. ':' .. record
    put(order_key, entries_key, id, entry, now_us)
    now_us = now_us + 1
  end
end
trim(order_key, entries_key, max_entries, ttl_ms)
redis.call('PUBLISH', channel, '')
return {DONE}
