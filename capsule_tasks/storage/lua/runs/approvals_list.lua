-- Reads a page of calls that wait, oldest first, in one of the orders of the index.
--
-- KEYS
--   order    zset  capsule:{approvals}:all
--   entries  hash  capsule:{approvals}:entries
-- ARGV
--   after  score of the last call of the page before; 0 for the first page
--   count  of calls at most
-- RETURNS {DONE, member, score, details, and so on}
-- REFUSES nothing
-- USES common, two_name_index

local order_key, entries_key = KEYS[1], KEYS[2]
local after, count = ARGV[1], ARGV[2]

local found = redis.call('ZRANGEBYSCORE', order_key, '(' .. after, '+inf', 'WITHSCORES',
  'LIMIT', 0, count)
return index_page(entries_key, found)
