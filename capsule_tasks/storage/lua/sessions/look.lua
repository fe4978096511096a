-- Reads where a call of a session is, and who has the session.
--
-- KEYS
--   session  hash    capsule:{S:<session>}:session
--   calls    stream  capsule:{S:<session>}:calls
--   known    zset    capsule:{S:<session>}:known
-- ARGV
--   call  id of the call
-- RETURNS {DONE, place, profile, owner}; place of the call: unfinished, done, gone, or forgotten
--         where its session is being erased
-- REFUSES nothing
-- USES common, session

local session_key, calls_key, known_key = KEYS[1], KEYS[2], KEYS[3]
local call = ARGV[1]

local session = load_session(session_key, calls_key)
local known = redis.call('ZSCORE', known_key, call)
local place = known == 'inf' and 'unfinished' or known and 'done' or 'gone'
if session.forgetting then place = 'forgotten' end
return {DONE, place, session.profile or '', session.owner or ''}
