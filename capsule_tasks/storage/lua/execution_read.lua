-- What an execution said after an event that is known, and how it stands.
--
-- KEYS
--   meta    hash    capsule:{E:<execution>}:meta
--   events  stream  capsule:{E:<execution>}:events
-- ARGV
--   after  id of the last event that is known, or empty
--   count  at most so many
-- RETURNS {DONE, state, outcome, attempt, seq, gone, events: id, ms, data, …}
-- REFUSES {MISSING} an execution nobody claimed, or that has expired
-- USES once, execution

local meta_key, events_key = KEYS[1], KEYS[2]
local after, count = ARGV[1], tonumber(ARGV[2])

local function is_behind(id)
  local attempt, seq = id:match('^(%d+)-(%d+)$')
  local after_attempt, after_seq = after:match('^(%d+)-(%d+)$')
  if not after_attempt then return true end
  if tonumber(attempt) ~= tonumber(after_attempt) then
    return tonumber(attempt) > tonumber(after_attempt)
  end
  return tonumber(seq) > tonumber(after_seq)
end

local meta = load_execution(meta_key)
if not meta.state then return {MISSING} end
local reply = {DONE, meta.state, meta.outcome or '', whole(meta.attempt), meta.seq, meta.gone or ''}
for _, id in ipairs(quiet_ids(meta)) do
  if is_behind(id) and (#reply - 6) / 3 < count then
    local at_ms, data = redis.call('HGET', meta_key, id):match('^(%d+):(.*)$')
    for _, value in ipairs({id, at_ms, data}) do reply[#reply + 1] = value end
  end
end
if meta.loud and count > 0 then
  local start = after == '' and '-' or '(' .. after
  for _, entry in ipairs(redis.call('XRANGE', events_key, start, '+', 'COUNT', count)) do
    for _, value in ipairs({entry[1], entry[2][2], entry[2][4]}) do reply[#reply + 1] = value end
  end
end
return reply
