-- The record of an execution.
--
-- KEYS
--   meta  hash  capsule:{E:<execution>}:meta
-- ARGV
-- RETURNS {DONE, state, attempt, owner, worker, task, ack, outcome, claimed ms,
--         ended ms, group, index, stream}
-- REFUSES {MISSING} an execution that was never claimed, or has expired
-- USES common

local meta_key = KEYS[1]

local got = redis.call('HMGET', meta_key, 'state', 'attempt', 'owner', 'worker', 'task', 'ack',
  'outcome', 'claimed', 'ended', 'group', 'index', 'stream')
if not got[1] then return {MISSING} end
local reply = {DONE}
for n = 1, 12 do reply[n + 1] = got[n] or '' end
return reply
