-- What was noted of one execution.
--
-- KEYS
--   entries  hash  capsule:{recent}:entries
-- ARGV
--   id  the execution
-- RETURNS {DONE, noted, record}
-- REFUSES {MISSING} it is not among the recent ones
-- USES once

local entries_key, id = KEYS[1], ARGV[1]

local record = redis.call('HGET', entries_key, id)
if not record then return {MISSING} end
local noted, said = record:match('^%d+:(%d+):(.*)$')
return {DONE, noted, said}
