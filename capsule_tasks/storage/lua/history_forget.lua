-- Removes records that were popped, so that a cleared history leaves none of its items behind.
--
-- KEYS
--   popped    zset  capsule:{S:<session>}:popped
--   taken...  string  capsule:{S:<session>}:popped:<operation>
-- ARGV
-- RETURNS {DONE}
-- REFUSES nothing
-- USES once

local popped_key, FIRST_TAKEN = KEYS[1], 2

for index = FIRST_TAKEN, #KEYS do
  redis.call('UNLINK', KEYS[index])
  redis.call('ZREM', popped_key, KEYS[index])
end
return {DONE}
