-- Takes a session for one owner, who learns of the call that was begun and of the checkpoint.
--
-- A session that does not exist is made: its producer may have listed it and be about to submit.
--
-- KEYS
--   session     hash    capsule:{S:<session>}:session
--   calls       stream  capsule:{S:<session>}:calls
--   known       zset    capsule:{S:<session>}:known
--   operations  hash    capsule:{S:<session>}:operations
-- ARGV
--   operation_id  id of this write
--   age_ms        since the operation was first sent; 0 the first time
--   incarnation   of the worker that takes it
--   steal         token of an owner whose lease has lapsed, or 0
--   expected      token that the session must have, or 0
--   profile       of a session that is made
--   ttl_ms        until the session expires
-- RETURNS {DONE, token, profile, tenant, waiting, executions, executions at the
--         last restart, closing, checkpoint, begun seq or 0, begun call, payload,
--         ms since it was begun}
-- REFUSES {ABANDONED} an operation that its caller abandoned before it was done
--         {FORGOTTEN} a repeat that is older than the operation log
--         {HELD, incarnation, token} a session that has an owner, or not the expected token, or
--         that is being forgotten
-- USES common, operation_log, session

local session_key, calls_key, known_key, operations_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local operation_id, age_ms, incarnation = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local steal, expected, profile, ttl_ms = ARGV[4], ARGV[5], ARGV[6], ARGV[7]

local function granted(session, token)
  local got = redis.call('HMGET', session_key, 'executions', 'checkpoint', 'begun_at',
    'before_restart')
  local begun, ago_ms = {seq = '0', call = '', payload = ''}, 0
  if session.begun then
    begun = calls_after(calls_key, session.begun .. '-0', 1)[1]
    ago_ms = math.floor(clock_us() / 1000) - tonumber(got[3] or 0)
  end
  return {
    DONE, token, session.profile or profile, session.tenant or '', session.waiting,
    tonumber(got[1] or 0), tonumber(got[4] or 0), session.closing and 1 or 0, got[2] or '',
    tonumber(begun.seq), begun.call, begun.payload,
    ago_ms,
  }
end

local now_us = clock_us()
local log = read_log(operations_key, operation_id, age_ms, now_us)
if refuse_repeat(log) then return refuse_repeat(log) end
local session = load_session(session_key, calls_key)
if log.result and session.token == log.result and session.owner then
  return granted(session, log.result)
end
local is_other = expected ~= '0' and session.token ~= expected
if log.result or is_other or session.forgetting or session.owner and session.token ~= steal then
  return {HELD, session.owner or '', session.token}
end

local token = whole(math.max(tonumber(session.token) + 1, now_us))
redis.call('HSET', session_key, 'owner', incarnation, 'token', token)
if not session.profile then redis.call('HSET', session_key, 'profile', profile) end
for _, key in ipairs({session_key, calls_key, known_key}) do redis.call('PEXPIRE', key, ttl_ms) end
write_log(operations_key, operation_id, token, log)
return granted(session, token)
