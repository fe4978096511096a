-- Registers a worker in the index of workers, removes others, and lists those that are due.
--
-- KEYS
--   workers  zset  capsule:workers
-- ARGV
--   worker          incarnation to register, or empty
--   lease_ms        until the worker should be checked
--   ttl_ms          until the index expires
--   max_due         how many due workers are listed
--   incarnation...  to remove: they hold nothing any more
-- RETURNS {DONE, ms until the next is due or -1, incarnations that are due…}
-- REFUSES nothing
-- USES common, registry

local workers_key = KEYS[1]
local worker, lease_ms, ttl_ms, max_due = ARGV[1], tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4])
local FIRST = 5

return look_up(workers_key, worker, lease_ms, ttl_ms, max_due, FIRST)
