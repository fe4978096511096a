-- Tells an execution something, and rings the worker that has it: all of them, if none is known.
--
-- KEYS
--   meta     hash    capsule:{E:<execution>}:meta
--   control  stream  capsule:{E:<execution>}:control
-- ARGV
--   command    id of this command; the same one again changes nothing
--   keep_ms    how long it waits for a worker
--   bells      what the channel of a worker begins with
--   execution  id of the execution, for the worker
--   data       the command
-- RETURNS {DONE, state}; the state is empty where nobody has claimed it
-- REFUSES {ENDED, outcome} an execution that is over
-- USES once, execution

local meta_key, control_key = KEYS[1], KEYS[2]
local command, keep_ms, bells, execution, data = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]

-- No more than a claim reads, which has to see the newest.
local MOST, LOOK_BACK = 1000, 32

local meta = load_execution(meta_key)
if meta.state == 'ended' then return {ENDED, meta.outcome or ''} end
local is_known = false
for _, entry in ipairs(redis.call('XREVRANGE', control_key, '+', '-', 'COUNT', LOOK_BACK)) do
  is_known = is_known or entry[2][2] == command
end
if not is_known then
  redis.call('XADD', control_key, 'MAXLEN', MOST, '*', 'c', command, 'd', data)
  redis.call('PEXPIRE', control_key, keep_ms)
end
-- It may have begun some milliseconds ago in a worker that has not said so yet.
redis.call('PUBLISH', bells .. (meta.owner or ''), execution)
return {DONE, meta.state or ''}
