-- Appends a call to a session's log and rings the owner, unless it is busy with another call.
--
-- KEYS
--   session  hash    capsule:{S:<session>}:session
--   calls    stream  capsule:{S:<session>}:calls
--   known    zset    capsule:{S:<session>}:known
-- ARGV
--   session_id       for the owner
--   call             id of the call; one that is known is not appended again, but rings
--   payload          the call
--   profile          of the session
--   tenant           of the session, or empty if the caller does not say
--   may_wait         0 to refuse if a call is unfinished
--   listed_under     token that an UNLISTED reply gave, if the session was listed since; or empty
--   max_waiting      how many calls may wait
--   ttl_ms           until the session expires
--   doorbell_prefix  channel of a worker's doorbell without its incarnation
-- RETURNS {DONE, seq, owner, waiting}; seq is 0 for a call that was known, owner may be empty
-- REFUSES {CHANGED, profile, tenant} a session of another profile or tenant
--         {ENDED} a session that is being closed
--         {BUSY, unfinished} a session with unfinished calls, if the call may not wait
--         {FULL, waiting} a log with too many calls
--         {UNLISTED, token} a session that nobody is about to take: list it first
-- USES common, session

local session_key, calls_key, known_key = KEYS[1], KEYS[2], KEYS[3]
local session_id, call, payload, profile, tenant = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local may_wait, listed_under, max_waiting = ARGV[6] == '1', ARGV[7], tonumber(ARGV[8])
local ttl_ms, doorbell_prefix = ARGV[9], ARGV[10]

local session = load_session(session_key, calls_key)
local is_new = not session.profile
if not is_new and session.profile ~= profile
  or (session.tenant or '') ~= '' and tenant ~= '' and session.tenant ~= tenant
  or session.created and session.tenant == '' and tenant ~= '' then
  return {CHANGED, session.profile or '', session.tenant or ''}
end
local function ring()
  if session.owner and not session.begun then
    redis.call('PUBLISH', doorbell_prefix .. session.owner .. ':sessions', session_id)
  end
end

local known = redis.call('ZSCORE', known_key, call)
if known then
  if known == 'inf' then ring() end -- the ring before may be lost
  return {DONE, 0, session.owner or '', session.waiting}
end
if session.closing then return {ENDED} end
if not may_wait and session.unfinished > 0 then return {BUSY, session.unfinished} end
if session.waiting >= max_waiting then return {FULL, session.waiting} end
if not session.owner and session.unfinished == 0 and listed_under ~= session.token then
  return {UNLISTED, session.token}
end

local seq, now_ms = whole(session.seq + 1), whole(math.floor(clock_us() / 1000))
redis.call('XADD', calls_key, seq .. '-0', 'c', call, 'd', payload)
redis.call('ZADD', known_key, '+inf', call)
redis.call('HSET', session_key, 'seq', seq, 'used', now_ms)
if is_new then redis.call('HSET', session_key, 'profile', profile) end
if not session.created then
  redis.call('HSET', session_key, 'created', now_ms, 'tenant', tenant)
end
for _, key in ipairs({session_key, calls_key, known_key}) do redis.call('PEXPIRE', key, ttl_ms) end
ring()
return {DONE, tonumber(seq), session.owner or '', session.waiting + 1}
