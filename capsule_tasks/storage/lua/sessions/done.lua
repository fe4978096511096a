-- Removes a call that has ended from a session's log; its id stays known for a time.
--
-- KEYS
--   session  hash    capsule:{S:<session>}:session
--   calls    stream  capsule:{S:<session>}:calls
--   known    zset    capsule:{S:<session>}:known
-- ARGV
--   token         of the owner
--   seq           of the call, which was begun; one that is done already changes nothing
--   has_run       0 for a call that was refused, or cancelled before it ran: no execution
--   cpu_ms        that it took
--   known_ttl_ms  how long its id is known
--   ttl_ms        until the session expires
-- RETURNS {DONE, waiting}
-- REFUSES {STALE, owner, token} an owner that has lost the session
-- USES common, session

local session_key, calls_key, known_key = KEYS[1], KEYS[2], KEYS[3]
local token, seq, has_run, cpu_ms = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local known_ttl_ms, ttl_ms = tonumber(ARGV[5]), ARGV[6]

local session = load_session(session_key, calls_key)
if not is_owner(session, token) then return {STALE, session.owner or '', session.token} end
if session.begun == seq then
  local now_ms = math.floor(clock_us() / 1000)
  redis.call('XDEL', calls_key, seq .. '-0')
  redis.call('HDEL', session_key, 'begun', 'begun_call', 'begun_at')
  redis.call('HSET', session_key, 'used', whole(now_ms))
  redis.call('HINCRBY', session_key, 'executions', has_run)
  redis.call('HINCRBY', session_key, 'cpu_ms', cpu_ms)
  redis.call('ZADD', known_key, whole(now_ms), session.begun_call)
  drop_until(known_key, now_ms - known_ttl_ms)
  for _, key in ipairs({session_key, calls_key, known_key}) do
    redis.call('PEXPIRE', key, ttl_ms)
  end
end
return {DONE, session.waiting}
