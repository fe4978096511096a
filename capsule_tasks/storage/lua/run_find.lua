-- Tells in which session a run lives.
--
-- KEYS
--   place  hash  capsule:{R:<run>}
-- ARGV
-- RETURNS {DONE, session}
-- REFUSES {MISSING} a run that nobody has placed
-- USES once

local place_key = KEYS[1]

local session = redis.call('HGET', place_key, 'session')
if not session then return {MISSING} end
return {DONE, session}
