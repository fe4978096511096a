-- Reads ids of a session's calls: of those that are unfinished, or were done not long ago.
--
-- KEYS
--   known  zset  capsule:{S:<session>}:known
-- ARGV
--   offset  how many ids to skip
--   count   of ids at most
-- RETURNS {DONE, call, …}
-- REFUSES nothing
-- USES common

local known_key = KEYS[1]
local offset, count = tonumber(ARGV[1]), tonumber(ARGV[2])

return {DONE, unpack(redis.call('ZRANGE', known_key, offset, offset + count - 1))}
