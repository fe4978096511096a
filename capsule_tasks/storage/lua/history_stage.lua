-- Puts one piece of a replacement beside the history, where nobody reads it.
--
-- KEYS
--   stage  list  capsule:{S:<session>}:stage:<operation>
-- ARGV
--   offset     of the piece in the replacement; 0 begins anew
--   ttl_ms     until an abandoned stage expires
--   record...  the piece, in order
-- RETURNS {DONE}
-- REFUSES {CONFLICT, length} a stage whose length does not fit the offset
-- USES once, history

local stage_key = KEYS[1]
local offset, ttl_ms = tonumber(ARGV[1]), ARGV[2]
local FIRST = 3

local count = #ARGV - FIRST + 1
local length = redis.call('LLEN', stage_key)
if offset > 0 and length == offset + count then return {DONE} end
if offset > 0 and length ~= offset then return {CONFLICT, length} end

-- A DEL of nothing would already make a server that is out of memory take what follows.
if offset == 0 and length > 0 then redis.call('DEL', stage_key) end
push(stage_key, ARGV, FIRST)
redis.call('PEXPIRE', stage_key, ttl_ms)
return {DONE}
