-- Appends a chunk of a replacement to a list of its own, until the replacement is committed.
--
-- KEYS
--   staging  list  capsule:{S:<session>}:staging:<operation>
-- ARGV
--   offset     of the chunk in the replacement; 0 starts over
--   ttl_ms     until an abandoned list expires
--   record...  of the chunk, in order
-- RETURNS {DONE}
-- REFUSES {CONFLICT, length} a list whose length does not fit the offset
-- USES common, history

local staging_key = KEYS[1]
local offset, ttl_ms = tonumber(ARGV[1]), ARGV[2]
local FIRST = 3

local count = #ARGV - FIRST + 1
local length = redis.call('LLEN', staging_key)
if offset > 0 and length == offset + count then return {DONE} end
if offset > 0 and length ~= offset then return {CONFLICT, length} end

-- A DEL of nothing would make a server that is out of memory accept the writes that follow.
if offset == 0 and length > 0 then redis.call('DEL', staging_key) end
push(staging_key, ARGV, FIRST)
redis.call('PEXPIRE', staging_key, ttl_ms)
return {DONE}
