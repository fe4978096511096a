-- Counts ends of members of a group, each once.
--
-- KEYS
--   counts    hash    capsule:{G:<group>}:counts
--   failures  stream  capsule:{G:<group>}:failures
--   seen      string  capsule:{G:<group>}:seen
-- ARGV
--   keep_ms    until it is forgotten
--   most       failures that are kept
--   channel    that is rung
--   member...  place in the group, outcome, description of a failure or empty, …
-- RETURNS {DONE}
-- REFUSES nothing
-- USES once

local counts_key, failures_key, seen_key = KEYS[1], KEYS[2], KEYS[3]
local keep_ms, most, channel = ARGV[1], ARGV[2], ARGV[3]
local FIRST = 4

for place = FIRST, #ARGV, 3 do
  local index, outcome, failure = ARGV[place], ARGV[place + 1], ARGV[place + 2]
  if redis.call('SETBIT', seen_key, index, 1) == 0 then
    redis.call('HINCRBY', counts_key, outcome, 1)
    if failure ~= '' then redis.call('XADD', failures_key, 'MAXLEN', '~', most, '*', 'd', failure) end
  end
end
redis.call('PEXPIRE', counts_key, keep_ms)
redis.call('PEXPIRE', failures_key, keep_ms)
redis.call('PEXPIRE', seen_key, keep_ms)
redis.call('PUBLISH', channel, '')
return {DONE}
