-- Notes that the message of a run was sent, unless the run needs another since.
--
-- KEYS
--   run  hash  capsule:{S:<session>}:run:<run>
-- ARGV
--   updated  of the run when its message became due
-- RETURNS {DONE}
-- REFUSES nothing
-- USES common

local run_key = KEYS[1]
local updated = ARGV[1]

if redis.call('HGET', run_key, 'unsent') == updated then
  redis.call('HSET', run_key, 'unsent', '')
end
return {DONE}
