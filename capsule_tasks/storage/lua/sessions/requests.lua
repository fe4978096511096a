-- Reads the requests to the owner of a session that are not answered.
--
-- KEYS
--   session   hash    capsule:{S:<session>}:session
--   calls     stream  capsule:{S:<session>}:calls
--   requests  stream  capsule:{S:<session>}:requests
-- ARGV
--   token  of the owner
--   after  id of the last entry that was read, or empty
--   count  of requests at most
-- RETURNS {DONE, closing, entry, request, payload, …}
-- REFUSES {STALE, owner, token} an owner that has lost the session
-- USES common, session

local session_key, calls_key, requests_key = KEYS[1], KEYS[2], KEYS[3]
local token, after, count = ARGV[1], ARGV[2], ARGV[3]

local session = load_session(session_key, calls_key)
if not is_owner(session, token) then return {STALE, session.owner or '', session.token} end
local reply = {DONE, session.closing and 1 or 0}
local start = after == '' and '-' or '(' .. after
for _, entry in ipairs(redis.call('XRANGE', requests_key, start, '+', 'COUNT', count)) do
  for _, value in ipairs({entry[1], entry[2][2], entry[2][4]}) do reply[#reply + 1] = value end
end
return reply
