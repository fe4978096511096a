-- Records which executions a worker is going to hold, and which it no longer holds.
--
-- KEYS
--   worker  hash  capsule:{W:<incarnation>}
--   held    set   capsule:{W:<incarnation>}:held
-- ARGV
--   token   of the worker's lease
--   ttl_ms  until the record expires
--   count   how many of the ids are held from now on; the others no longer are
--   id...   of executions
-- RETURNS {DONE}
-- REFUSES {LOST} a lease that has lapsed or never existed
-- USES common, holds

local worker_key, held_key = KEYS[1], KEYS[2]
local token, ttl_ms, count = ARGV[1], ARGV[2], tonumber(ARGV[3])
local FIRST = 4

return record_held(worker_key, held_key, token, ttl_ms, count, FIRST)
