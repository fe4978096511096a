-- Counts the ends of members of a group, each member once.
--
-- KEYS
--   counts    hash    capsule:{G:<group>}:counts
--   failures  stream  capsule:{G:<group>}:failures
--   seen      string  capsule:{G:<group>}:seen
-- ARGV
--   ttl_ms        until the group expires
--   max_failures  how many failures are stored
--   channel       to publish on
--   member...     index in the group, outcome, description of a failure or empty, …
-- RETURNS {DONE}
-- REFUSES nothing
-- USES common

local counts_key, failures_key, seen_key = KEYS[1], KEYS[2], KEYS[3]
local ttl_ms, max_failures, channel = ARGV[1], ARGV[2], ARGV[3]
local FIRST = 4

for n = FIRST, #ARGV, 3 do
  local index, outcome, failure = ARGV[n], ARGV[n + 1], ARGV[n + 2]
  if redis.call('SETBIT', seen_key, index, 1) == 0 then
    redis.call('HINCRBY', counts_key, outcome, 1)
    if failure ~= '' then
      redis.call('XADD', failures_key, 'MAXLEN', '~', max_failures, '*', 'd', failure)
    end
  end
end
redis.call('PEXPIRE', counts_key, ttl_ms)
redis.call('PEXPIRE', failures_key, ttl_ms)
redis.call('PEXPIRE', seen_key, ttl_ms)
redis.call('PUBLISH', channel, '')
return {DONE}
