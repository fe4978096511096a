-- Sends a command to an execution and rings its worker, or every worker if none is known.
--
-- KEYS
--   meta     hash    capsule:{E:<execution>}:meta
--   control  stream  capsule:{E:<execution>}:control
-- ARGV
--   command          id of this command; a repeat under it changes nothing
--   ttl_ms           how long the command waits for a worker
--   doorbell_prefix  channel of a worker's doorbell without its incarnation
--   execution        id of the execution, for the worker
--   data             the command
-- RETURNS {DONE, state}; the state is empty for one that was never claimed
-- REFUSES {ENDED, outcome} an execution that has ended
-- USES common, execution

local meta_key, control_key = KEYS[1], KEYS[2]
local command, ttl_ms, doorbell_prefix = ARGV[1], ARGV[2], ARGV[3]
local execution, data = ARGV[4], ARGV[5]

-- No more than a claim reads, because a claim has to see the newest.
local MAX_COMMANDS, LOOK_BACK = 1000, 32

local meta = load_execution(meta_key)
if meta.state == 'ended' then return {ENDED, meta.outcome or ''} end
local is_known = false
for _, entry in ipairs(redis.call('XREVRANGE', control_key, '+', '-', 'COUNT', LOOK_BACK)) do
  is_known = is_known or entry[2][2] == command
end
if not is_known then
  redis.call('XADD', control_key, 'MAXLEN', MAX_COMMANDS, '*', 'c', command, 'd', data)
  redis.call('PEXPIRE', control_key, ttl_ms)
end
-- Also without an owner: a worker may have claimed it some milliseconds ago, in a call to come.
redis.call('PUBLISH', doorbell_prefix .. (meta.owner or ''), execution)
return {DONE, meta.state or ''}
