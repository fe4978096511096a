-- Shared by the scripts of tenants: the reservations of live sessions, and all sessions of one.

local function reserve_until(live_key, until_ms, session_id, ttl_ms)
  redis.call('ZADD', live_key, whole(until_ms), session_id)
  redis.call('PEXPIRE', live_key, ttl_ms)
end

-- Notes that a session is the tenant's, for whoever forgets the tenant.
local function note_session(sessions_key, now_ms, session_id, ttl_ms)
  redis.call('ZADD', sessions_key, whole(now_ms), session_id)
  drop_until(sessions_key, now_ms - ttl_ms)
  redis.call('PEXPIRE', sessions_key, ttl_ms)
end
