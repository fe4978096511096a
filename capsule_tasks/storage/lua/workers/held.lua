-- Reads executions that a worker with a lapsed lease held, after removing those that were reaped.
--
-- KEYS
--   worker  hash  capsule:{W:<incarnation>}
--   held    set   capsule:{W:<incarnation>}:held
-- ARGV
--   count  of executions at most
--   id...  of executions that were reaped
-- RETURNS {DONE, ids…}
-- REFUSES {HELD} a lease that has not lapsed
-- USES common, holds

local worker_key, held_key = KEYS[1], KEYS[2]
local count = tonumber(ARGV[1])
local FIRST = 2

return read_held(worker_key, held_key, count, FIRST)
