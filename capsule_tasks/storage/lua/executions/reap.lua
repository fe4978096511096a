-- Writes the end of an attempt whose worker died, as an attempt of its own.
--
-- KEYS
--   meta     hash    capsule:{E:<execution>}:meta
--   events   stream  capsule:{E:<execution>}:events
--   control  stream  capsule:{E:<execution>}:control
-- ARGV
--   owner    incarnation that died
--   attempt  that the incarnation had claimed
--   outcome  of the execution; empty if its message is redelivered
--   limits   retention in bytes and milliseconds; see lib/execution
--   channel  to publish on
--   event    that ends the attempt or the execution
-- RETURNS {DONE, attempt}
-- REFUSES {MISSING} an execution that was never claimed, or has expired
--         {STALE, attempt} an attempt that another one followed
--         {ENDED, outcome} an attempt or execution that has ended
-- USES common, execution

local meta_key, events_key, control_key = KEYS[1], KEYS[2], KEYS[3]
local owner, attempt, outcome = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local limits, channel, event = ARGV[4], ARGV[5], ARGV[6]

local meta = load_execution(meta_key, limits)
if not meta.state then return {MISSING} end
if meta.state ~= 'running' then return {ENDED, meta.outcome or ''} end
if meta.owner ~= owner or meta.attempt ~= attempt then return {STALE, whole(meta.attempt)} end

meta.attempt = math.max(meta.attempt + 1, tonumber(meta.now_ms))
meta.seq = 0
change(meta, 'attempt', whole(meta.attempt))
store(meta_key, events_key, meta, {event}, 1, 1, false)
local state = outcome == '' and 'waiting' or 'ended'
close(meta_key, events_key, control_key, meta, state, outcome)
redis.call('PUBLISH', channel, '')
return {DONE, whole(meta.attempt)}
