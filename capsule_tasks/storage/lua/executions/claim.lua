-- Claims an execution's next attempt for a worker, stores its first events, and reads its
-- commands.
--
-- KEYS
--   meta     hash    capsule:{E:<execution>}:meta
--   events   stream  capsule:{E:<execution>}:events
--   control  stream  capsule:{E:<execution>}:control
-- ARGV
--   claim               id of this claim; repeated under it, the reply is the same
--   owner               incarnation of the worker
--   held_by             the owner it is taken from; `-` if it must run nowhere; empty for any
--   details             ack (early or late), task, worker, group, index, limits, as MessagePack
--   state               as in execution_append: empty, or the end of the attempt or the execution
--   outcome             of the execution, if it ended
--   has_stream_content  1 if an event among these needs a stream
--   channel             to publish on
--   lost                event that ends an attempt which did not end before
--   event...            the claim, and what followed
-- RETURNS {DONE, attempt, seq, control entries: id, data, …}
-- REFUSES {ENDED, outcome} an execution that has ended
--         {STALE, attempt, claim} an execution with another owner; its last claim
-- USES common, execution

local meta_key, events_key, control_key = KEYS[1], KEYS[2], KEYS[3]
local claim, owner, held_by, details = ARGV[1], ARGV[2], ARGV[3], cmsgpack.unpack(ARGV[4])
local state, outcome, has_stream_content = ARGV[5], ARGV[6], ARGV[7] == '1'
local channel, lost = ARGV[8], ARGV[9]
local FIRST = 10

local ack, task, worker, group, index, limits = unpack(details)
local meta = load_execution(meta_key, limits)
if meta.claim == claim then
  return {DONE, whole(meta.attempt), meta.seq, unpack(control_entries(control_key, ''))}
end
if meta.state == 'ended' then return {ENDED, meta.outcome or ''} end
if held_by == '-' then
  if meta.state == 'running' then return {STALE, whole(meta.attempt), meta.claim or ''} end
elseif held_by ~= '' and (meta.state ~= 'running' or meta.owner ~= held_by) then
  return {STALE, whole(meta.attempt), meta.claim or ''}
end

local was_running = meta.state == 'running'
meta.attempt = math.max(meta.attempt + 1, tonumber(meta.now_ms))
meta.seq = 0
change(meta, 'state', 'running', 'attempt', whole(meta.attempt), 'claim', claim, 'ack', ack,
  'worker', worker, 'claimed', meta.now_ms)
if state == '' then change(meta, 'owner', owner) end
if task ~= '' then change(meta, 'task', task) end
if group ~= '' then change(meta, 'group', group, 'index', index) end
if was_running then store(meta_key, events_key, meta, {lost}, 1, 1, false) end
store(meta_key, events_key, meta, ARGV, FIRST, #ARGV, has_stream_content)
local commands = control_entries(control_key, '')
close(meta_key, events_key, control_key, meta, state, outcome)
redis.call('PUBLISH', channel, '')
return {DONE, whole(meta.attempt), meta.seq, unpack(commands)}
