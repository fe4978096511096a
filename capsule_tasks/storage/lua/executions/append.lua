-- Appends events of an attempt: those that are missing, and none of a stale attempt.
--
-- KEYS
--   meta     hash    capsule:{E:<execution>}:meta
--   events   stream  capsule:{E:<execution>}:events
--   control  stream  capsule:{E:<execution>}:control
-- ARGV
--   attempt             of the events
--   first_seq           of the first event
--   state               empty, waiting (the attempt ends, another follows) or ended
--   outcome             of the execution, if it ended
--   has_stream_content  1 if an event among these needs a stream
--   limits              retention in bytes and milliseconds; see lib/execution
--   channel             to publish on
--   event...            in order
-- RETURNS {DONE, seq}
-- REFUSES {MISSING} an execution that was never claimed, or has expired
--         {STALE, attempt, claim} an attempt that another one followed; that one and its claim
--         {ENDED, outcome} an attempt or execution that has ended
--         {CONFLICT, seq} events after a hole
-- USES common, execution

local meta_key, events_key, control_key = KEYS[1], KEYS[2], KEYS[3]
local attempt, first_seq, state, outcome = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3], ARGV[4]
local has_stream_content, limits, channel = ARGV[5] == '1', ARGV[6], ARGV[7]
local FIRST = 8

local meta = load_execution(meta_key, limits)
if not meta.state then
  redis.call('PUBLISH', channel, '') -- a watcher of it would wait for ever
  return {MISSING}
end
if meta.attempt ~= attempt then return {STALE, whole(meta.attempt), meta.claim or ''} end
local last_seq = first_seq + #ARGV - FIRST
if meta.state ~= 'running' then
  if last_seq <= meta.seq then return {DONE, meta.seq} end
  return {ENDED, meta.outcome or ''}
end
if first_seq > meta.seq + 1 then return {CONFLICT, meta.seq} end
if last_seq <= meta.seq then return {DONE, meta.seq} end

store(meta_key, events_key, meta, ARGV, FIRST + meta.seq + 1 - first_seq, #ARGV, has_stream_content)
close(meta_key, events_key, control_key, meta, state, outcome)
redis.call('PUBLISH', channel, '')
return {DONE, meta.seq}
