-- The record of an execution.
--
-- KEYS
--   meta  hash  capsule:{E:<execution>}:meta
-- ARGV
-- RETURNS {DONE, state, attempt, owner, worker, task, ack, outcome, begun, over, group, index, loud}
-- REFUSES {MISSING} an execution nobody claimed, or that has expired
-- USES once

local meta_key = KEYS[1]

local got = redis.call('HMGET', meta_key, 'state', 'attempt', 'owner', 'worker', 'task', 'ack',
  'outcome', 'begun', 'over', 'group', 'index', 'loud')
if not got[1] then return {MISSING} end
local reply = {DONE}
for place = 1, 12 do reply[place + 1] = got[place] or '' end
return reply
