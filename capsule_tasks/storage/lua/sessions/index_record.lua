-- Records sessions in the index of them; drops the oldest above a maximum.
--
-- KEYS
--   order    zset  capsule:{sessions}:order
--   entries  hash  capsule:{sessions}:entries
-- ARGV
--   max_entries  of the index
--   ttl_ms       until the index expires, after the last write
--   update...    id, record, …; an empty record drops the session
-- RETURNS {DONE}
-- REFUSES nothing
-- USES common, index

local order_key, entries_key = KEYS[1], KEYS[2]
local max_entries, ttl_ms = tonumber(ARGV[1]), tonumber(ARGV[2])
local FIRST = 3

local now_us = next_us(order_key)
for n = FIRST, #ARGV, 2 do
  local id, record = ARGV[n], ARGV[n + 1]
  if record == '' then
    drop(order_key, entries_key, {id})
  else
    put(order_key, entries_key, id, record, now_us)
    now_us = now_us + 1
  end
end
local old_us = whole(now_us - ttl_ms * 1000)
local old = redis.call('ZRANGEBYSCORE', order_key, '-inf', old_us, 'LIMIT', 0, SLICE)
drop(order_key, entries_key, old)
trim(order_key, entries_key, max_entries, ttl_ms)
return {DONE}
