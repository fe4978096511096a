-- Reads how many members of a group have ended, and failures after one that is known.
--
-- KEYS
--   counts    hash    capsule:{G:<group>}:counts
--   failures  stream  capsule:{G:<group>}:failures
--   seen      string  capsule:{G:<group>}:seen
-- ARGV
--   after  id of the last known failure, or empty
--   count  of failures at most
--   which  1 to include which members were counted
-- RETURNS {DONE, a bit for each index or empty, number of outcomes, outcome, count, …, failures:
--          id, description, …}
-- REFUSES nothing
-- USES common

local counts_key, failures_key, seen_key = KEYS[1], KEYS[2], KEYS[3]
local after, count, which = ARGV[1], ARGV[2], ARGV[3]

local seen = which == '1' and redis.call('GET', seen_key) or ''
local counts = redis.call('HGETALL', counts_key)
local reply = {DONE, seen, #counts / 2, unpack(counts)}
local start = after == '' and '-' or '(' .. after
for _, entry in ipairs(redis.call('XRANGE', failures_key, start, '+', 'COUNT', count)) do
  reply[#reply + 1] = entry[1]
  reply[#reply + 1] = entry[2][2]
end
return reply
