-- Reads the reply to a request, once there is one.
--
-- KEYS
--   reply  string  capsule:{S:<session>}:reply:<request>
-- ARGV
-- RETURNS {DONE, reply}
-- REFUSES {WAITING} a request that is not answered, or was answered long ago
-- USES common

local reply_key = KEYS[1]

local reply = redis.call('GET', reply_key)
return reply and {DONE, reply} or {WAITING}
