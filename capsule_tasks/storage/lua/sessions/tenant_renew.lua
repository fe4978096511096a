-- Renews the reservations of live sessions of a tenant, also of those that had lapsed.
--
-- KEYS
--   live      zset  capsule:{T:<tenant>}:live
--   sessions  zset  capsule:{T:<tenant>}:sessions
-- ARGV
--   lease_ms       until the reservations lapse
--   ttl_ms         how long it is known that the sessions are the tenant's
--   session_id...  that the caller holds
-- RETURNS {DONE}
-- REFUSES nothing
-- USES common, tenant

local live_key, sessions_key = KEYS[1], KEYS[2]
local lease_ms, ttl_ms = tonumber(ARGV[1]), tonumber(ARGV[2])
local FIRST = 3

local now_ms = math.floor(clock_us() / 1000)
for n = FIRST, #ARGV do
  reserve_until(live_key, now_ms + lease_ms, ARGV[n], ttl_ms)
  note_session(sessions_key, now_ms, ARGV[n], ttl_ms)
end
return {DONE}
