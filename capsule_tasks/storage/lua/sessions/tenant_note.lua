-- Notes that a session is a tenant's, before anything is stored of it.
--
-- KEYS
--   sessions  zset  capsule:{T:<tenant>}:sessions
-- ARGV
--   session_id  of the tenant
--   ttl_ms      how long this is known
-- RETURNS {DONE}
-- REFUSES nothing
-- USES common, tenant

local sessions_key = KEYS[1]
local session_id, ttl_ms = ARGV[1], tonumber(ARGV[2])

note_session(sessions_key, math.floor(clock_us() / 1000), session_id, ttl_ms)
return {DONE}
