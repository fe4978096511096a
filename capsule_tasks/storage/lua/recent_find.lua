-- What was noted of executions.
--
-- KEYS
--   entries  hash  capsule:{recent}:entries
-- ARGV
--   id...  the executions
-- RETURNS {DONE, id, noted, record, …} of those that are among the recent ones
-- REFUSES nothing
-- USES once

local entries_key = KEYS[1]
local FIRST = 1

local reply = {DONE}
for at = FIRST, #ARGV do
  local record = redis.call('HGET', entries_key, ARGV[at])
  if record then
    local noted, said = record:match('^%d+:(%d+):(.*)$')
    for _, value in ipairs({ARGV[at], noted, said}) do reply[#reply + 1] = value end
  end
end
return reply
