-- Reads what the index of recent executions says of some of them.
--
-- KEYS
--   entries  hash  capsule:{recent}:entries
-- ARGV
--   id...  the executions
-- RETURNS {DONE, id, recorded us, record, …} of those in the index
-- REFUSES nothing
-- USES common

local entries_key = KEYS[1]
local FIRST = 1

local reply = {DONE}
for n = FIRST, #ARGV do
  local record = redis.call('HGET', entries_key, ARGV[n])
  if record then
    local recorded_us, entry = record:match('^%d+:(%d+):(.*)$')
    for _, value in ipairs({ARGV[n], recorded_us, entry}) do reply[#reply + 1] = value end
  end
end
return reply
