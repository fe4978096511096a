-- Removes a session from the list of those that are wanted, unless it was listed again since.
--
-- KEYS
--   wanted  zset  capsule:{wanted:<profile>}
--   marks   hash  capsule:{wanted:<profile>}:marks
-- ARGV
--   session_id  to remove
--   mark        of the listing
-- RETURNS {DONE, 1} if it was removed, {DONE, 0} if it was listed again, or is not listed
-- REFUSES nothing
-- USES common

local wanted_key, marks_key = KEYS[1], KEYS[2]
local session_id, mark = ARGV[1], ARGV[2]

if redis.call('HGET', marks_key, session_id) ~= mark then return {DONE, 0} end
redis.call('ZREM', wanted_key, session_id)
redis.call('HDEL', marks_key, session_id)
return {DONE, 1}
