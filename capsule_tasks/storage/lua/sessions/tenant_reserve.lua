-- Reserves a place for a live session of a tenant, until the reservation's lease lapses.
--
-- KEYS
--   live      zset  capsule:{T:<tenant>}:live
--   sessions  zset  capsule:{T:<tenant>}:sessions
-- ARGV
--   session_id    that is about to be taken; one that has a place keeps it
--   max_sessions  live sessions of the tenant; 0 for any number
--   lease_ms      until the reservation lapses
--   ttl_ms        how long it is known that the session is the tenant's
-- RETURNS {DONE, live sessions, with this one}
-- REFUSES {FULL, live sessions} a tenant with as many live sessions as it may have
-- USES common, tenant

local live_key, sessions_key = KEYS[1], KEYS[2]
local session_id, max_sessions = ARGV[1], tonumber(ARGV[2])
local lease_ms, ttl_ms = tonumber(ARGV[3]), tonumber(ARGV[4])

local now_ms = math.floor(clock_us() / 1000)
drop_until(live_key, now_ms)
local live = redis.call('ZCOUNT', live_key, '(' .. whole(now_ms), '+inf')
if tonumber(redis.call('ZSCORE', live_key, session_id) or 0) <= now_ms then
  if max_sessions > 0 and live >= max_sessions then return {FULL, live} end
  live = live + 1
end
reserve_until(live_key, now_ms + lease_ms, session_id, ttl_ms)
note_session(sessions_key, now_ms, session_id, ttl_ms)
return {DONE, live}
