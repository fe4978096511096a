-- Removes popped records, so that nothing is left of a history that was cleared.
--
-- KEYS
--   popped    zset    capsule:{S:<session>}:popped
--   taken...  string  capsule:{S:<session>}:popped:<operation>
-- ARGV
-- RETURNS {DONE}
-- REFUSES nothing
-- USES common

local popped_key, FIRST_TAKEN = KEYS[1], 2

for index = FIRST_TAKEN, #KEYS do
  redis.call('UNLINK', KEYS[index])
  redis.call('ZREM', popped_key, KEYS[index])
end
return {DONE}
