-- Sends a request to the owner of a session, past the calls that wait, and rings the owner.
--
-- KEYS
--   session   hash    capsule:{S:<session>}:session
--   calls     stream  capsule:{S:<session>}:calls
--   requests  stream  capsule:{S:<session>}:requests
-- ARGV
--   session_id  for the owner
--   request     id of the request; a repeat under it changes nothing
--   payload     the request
--   ttl_ms      how long it waits
--   doorbell_prefix  channel of a worker's doorbell without its incarnation
-- RETURNS {DONE, owner}
-- REFUSES {MISSING} a session that does not exist
--         {LOST} a session without an owner
-- USES common, inbox, session

local session_key, calls_key, requests_key = KEYS[1], KEYS[2], KEYS[3]
local session_id, request, payload, ttl_ms = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local doorbell_prefix = ARGV[5]

local session = load_session(session_key, calls_key)
if not session.profile then return {MISSING} end
if not session.owner then return {LOST} end
append_once(requests_key, 'r', request, payload, ttl_ms)
redis.call('PUBLISH', doorbell_prefix .. session.owner .. ':requests', session_id)
return {DONE, session.owner}
