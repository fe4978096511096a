-- Registers an owner of runs, removes others, and lists those that are due for a look.
--
-- KEYS
--   owners  zset  capsule:{runs}:owners
-- ARGV
--   owner           incarnation to register, or empty
--   in_ms           until somebody should look at it
--   ttl_ms          until the registry expires
--   max_due         how many due owners are listed
--   incarnation...  to remove: they hold nothing any more
-- RETURNS {DONE, ms until the next is due or -1, incarnations that are due…}
-- REFUSES nothing
-- USES common, registry

local owners_key = KEYS[1]
local owner, in_ms, ttl_ms, max_due = ARGV[1], tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4])
local FIRST = 5

return look_up(owners_key, owner, in_ms, ttl_ms, max_due, FIRST)
