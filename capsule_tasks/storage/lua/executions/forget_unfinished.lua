-- Ends an execution, and erases all of it but this end, which its watchers read. A worker that still
-- runs it is refused its next write.
--
-- KEYS
--   meta     hash    capsule:{E:<execution>}:meta
--   events   stream  capsule:{E:<execution>}:events
--   control  stream  capsule:{E:<execution>}:control
-- ARGV
--   ttl_ms             how long the end is left
--   channel            to publish on
--   unclaimed_outcome  of an execution that no worker has claimed
--   unclaimed          event that ends it
--   claimed_outcome    of one that a worker has claimed
--   claimed            event that ends it
-- RETURNS {DONE, outcome}; also for an execution that was ended here before
-- REFUSES {ENDED, outcome} an execution that has ended otherwise
-- USES common, execution

local meta_key, events_key, control_key = KEYS[1], KEYS[2], KEYS[3]
local ttl_ms, channel = ARGV[1], ARGV[2]
local unclaimed_outcome, unclaimed, claimed_outcome, claimed = ARGV[3], ARGV[4], ARGV[5], ARGV[6]

local meta = load_execution(meta_key)
if meta.state == 'ended' then
  local is_forgotten = redis.call('HEXISTS', meta_key, 'forgotten') == 1
  return {is_forgotten and DONE or ENDED, meta.outcome}
end
local outcome, ended = unclaimed_outcome, unclaimed
if meta.state then outcome, ended = claimed_outcome, claimed end
local attempt = whole(math.max(meta.attempt + 1, tonumber(meta.now_ms)))
local id = attempt .. '-1'
redis.call('UNLINK', meta_key, events_key, control_key)
redis.call('HSET', meta_key, 'state', 'ended', 'outcome', outcome, 'attempt', attempt, 'seq', 1,
  'ended', meta.now_ms, 'inline', id, id, meta.now_ms .. ':' .. ended, 'forgotten', 1)
redis.call('PEXPIRE', meta_key, ttl_ms)
redis.call('PUBLISH', channel, '')
return {DONE, outcome}
