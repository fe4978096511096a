-- Takes a session from its owner, and lets nobody own or use it until `forget` has erased it.
--
-- The first call rings nobody, so that calls can be ended before the owner stops them; a repeat rings
-- the owner that has not left yet.
--
-- KEYS
--   session  hash    capsule:{S:<session>}:session
--   calls    stream  capsule:{S:<session>}:calls
-- ARGV
--   session_id       for the owner
--   ttl_ms           until the session expires if nobody goes on
--   doorbell_prefix  channel of a worker's doorbell without its incarnation
-- RETURNS {DONE, owner that has not left yet or empty}
-- REFUSES nothing
-- USES common, session

local session_key, calls_key = KEYS[1], KEYS[2]
local session_id, ttl_ms, doorbell_prefix = ARGV[1], ARGV[2], ARGV[3]

local session = load_session(session_key, calls_key)
local owner = session.forgetting
if owner then
  if owner ~= '' then
    redis.call('PUBLISH', doorbell_prefix .. owner .. ':requests', session_id)
  end
else
  owner = session.owner or ''
  local token = whole(math.max(tonumber(session.token) + 1, clock_us()))
  redis.call('HDEL', session_key, 'owner')
  redis.call('HSET', session_key, 'token', token, 'closing', 1, 'forgetting', owner)
end
redis.call('PEXPIRE', session_key, ttl_ms)
return {DONE, owner}
