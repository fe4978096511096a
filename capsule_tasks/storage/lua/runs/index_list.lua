-- Reads a page of runs in one of the orders of the index.
--
-- KEYS
--   order    zset  capsule:{runs}:all
--   entries  hash  capsule:{runs}:entries
-- ARGV
--   after         score of the last run of the page before; 0 for the first page
--   count         of runs at most
--   newest_first  1 or 0
-- RETURNS {DONE, member, score, details, and so on}
-- REFUSES nothing
-- USES common, two_name_index

local order_key, entries_key = KEYS[1], KEYS[2]
local after, count, newest_first = ARGV[1], ARGV[2], ARGV[3] == '1'

local found
if newest_first then
  local from = after == '0' and '+inf' or '(' .. after
  found = redis.call('ZREVRANGEBYSCORE', order_key, from, '-inf', 'WITHSCORES', 'LIMIT', 0, count)
else
  found = redis.call('ZRANGEBYSCORE', order_key, '(' .. after, '+inf', 'WITHSCORES',
    'LIMIT', 0, count)
end
return index_page(entries_key, found)
