-- Reads calls of a session that are unfinished, in their order.
--
-- KEYS
--   calls  stream  capsule:{S:<session>}:calls
-- ARGV
--   after  number of the last call that was read; 0 for none
--   count  of calls at most
-- RETURNS {DONE, seq, call, payload, …}
-- REFUSES nothing
-- USES common, session

local calls_key = KEYS[1]
local after, count = ARGV[1], ARGV[2]

local reply = {DONE}
for _, call in ipairs(calls_after(calls_key, '(' .. after .. '-0', count)) do
  for _, value in ipairs({tonumber(call.seq), call.call, call.payload}) do
    reply[#reply + 1] = value
  end
end
return reply
