-- Reads sessions that a worker with a lapsed lease held, after removing those that were reaped.
--
-- KEYS
--   worker    hash  capsule:{W:<incarnation>}
--   sessions  set   capsule:{W:<incarnation>}:sessions
-- ARGV
--   count  of sessions at most
--   id...  of sessions that were reaped
-- RETURNS {DONE, ids…}
-- REFUSES {HELD} a lease that has not lapsed
-- USES common, holds

local worker_key, sessions_key = KEYS[1], KEYS[2]
local count = tonumber(ARGV[1])
local FIRST = 2

return read_held(worker_key, sessions_key, count, FIRST)
