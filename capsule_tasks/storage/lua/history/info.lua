-- Reads size, times and quarantine of a history, without its items.
--
-- KEYS
--   items       list  capsule:{S:<session>}:items
--   history     hash  capsule:{S:<session>}:history
--   quarantine  list  capsule:{S:<session>}:quarantine
-- ARGV
-- RETURNS {DONE, length, bytes, created, updated, ms to live, quarantined}; created is 0 where
--         there is no history
-- REFUSES nothing
-- USES common, history

local items_key, history_key, quarantine_key = KEYS[1], KEYS[2], KEYS[3]

local state = load_history(history_key, items_key)
return {
  DONE, state.length, whole(state.bytes), state.created or '0', whole(state.updated),
  redis.call('PTTL', history_key), redis.call('LLEN', quarantine_key),
}
