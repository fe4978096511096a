-- Reads events of an execution after one that is known, and the execution's state.
--
-- KEYS
--   meta    hash    capsule:{E:<execution>}:meta
--   events  stream  capsule:{E:<execution>}:events
-- ARGV
--   after  id of the last known event, or empty
--   count  of events at most
-- RETURNS {DONE, state, outcome, attempt, seq, first kept id, events: id, ms, data, …}
-- REFUSES {MISSING} an execution that was never claimed, or has expired
-- USES common, execution

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
local reply = {
  DONE, meta.state, meta.outcome or '', whole(meta.attempt), meta.seq, meta.first_kept_id or '',
}
for _, id in ipairs(inline_ids(meta)) do
  if is_behind(id) and (#reply - 6) / 3 < count then
    local at_ms, data = redis.call('HGET', meta_key, id):match('^(%d+):(.*)$')
    for _, value in ipairs({id, at_ms, data}) do reply[#reply + 1] = value end
  end
end
if meta.stream and count > 0 then
  local start = after == '' and '-' or '(' .. after
  for _, entry in ipairs(redis.call('XRANGE', events_key, start, '+', 'COUNT', count)) do
    for _, value in ipairs({entry[1], entry[2][2], entry[2][4]}) do reply[#reply + 1] = value end
  end
end
return reply
