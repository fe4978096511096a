-- Reads a chunk of a history: the latest items before an index, packed by the hundred.
--
-- KEYS
--   items       list  capsule:{S:<session>}:items
--   history     hash  capsule:{S:<session>}:history
--   quarantine  list  capsule:{S:<session>}:quarantine
-- ARGV
--   generation  that the history must have; empty for any
--   before      index to read up to; -1 for the end
--   count       of items at most
--   max_bytes   to aim at, by the average size of items
--   renew_ms    new time to live; 0 to leave it as it is
-- RETURNS {DONE, generation, before, start, up to 100 items each in MessagePack...}
-- REFUSES {CONFLICT, generation} another generation than the one asked for
-- USES common, history

local items_key, history_key, quarantine_key = KEYS[1], KEYS[2], KEYS[3]
local generation, before, count = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local max_bytes, renew_ms = tonumber(ARGV[4]), tonumber(ARGV[5])

local PACKED = 100

local state = load_history(history_key, items_key)
local current = whole(state.generation)
if generation ~= '' and (generation ~= current or before > state.length) then
  return {CONFLICT, current}
end
if before < 0 then before = state.length end
if state.bytes > 0 then
  count = math.min(count, math.max(1, math.floor(max_bytes * state.length / state.bytes)))
end
local start = math.max(0, before - count)

if renew_ms > 0 then
  redis.call('PEXPIRE', items_key, renew_ms)
  redis.call('PEXPIRE', history_key, renew_ms)
  redis.call('PEXPIRE', quarantine_key, renew_ms)
end

-- One string for all items would be copied again and again as it grows; one for each item is slow
-- to receive.
local reply = {DONE, current, before, start}
for first = start, before - 1, PACKED do
  local items = redis.call('LRANGE', items_key, first, math.min(first + PACKED, before) - 1)
  reply[#reply + 1] = cmsgpack.pack(items)
end
return reply
