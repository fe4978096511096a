-- Erases in which session a run lives.
--
-- KEYS
--   location  hash  capsule:{R:<run>}
-- ARGV
-- RETURNS {DONE}
-- REFUSES nothing
-- USES common

local location_key = KEYS[1]

redis.call('UNLINK', location_key)
return {DONE}
