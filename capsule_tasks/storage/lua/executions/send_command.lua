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
-- USES common, execution, inbox

local meta_key, control_key = KEYS[1], KEYS[2]
local command, ttl_ms, doorbell_prefix = ARGV[1], ARGV[2], ARGV[3]
local execution, data = ARGV[4], ARGV[5]

local meta = load_execution(meta_key)
if meta.state == 'ended' then return {ENDED, meta.outcome or ''} end
append_once(control_key, 'c', command, data, ttl_ms)
-- Also without an owner: a worker may have claimed it some milliseconds ago, in a call to come.
redis.call('PUBLISH', doorbell_prefix .. (meta.owner or ''), execution)
return {DONE, meta.state or ''}
