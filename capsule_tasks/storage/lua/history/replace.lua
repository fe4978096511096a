-- Replaces the items that the writer has read, in one step.
--
-- Items before those stay, apart from the oldest ones if the writer prunes them. Items that were
-- appended since stay behind the replacement. Records that the writer could not read go to
-- quarantine.
--
-- KEYS
--   items       list  capsule:{S:<session>}:items
--   history     hash  capsule:{S:<session>}:history
--   operations  hash  capsule:{S:<session>}:operations
--   quarantine  list  capsule:{S:<session>}:quarantine
--   staging     list  capsule:{S:<session>}:staging:<operation>
-- ARGV
--   operation_id     id of this write
--   age_ms           since the operation was first sent; 0 the first time
--   ttl_ms           until the history expires
--   generation       that was read
--   start            index of the first item read
--   stop             index behind the last item read
--   pruned           records to remove from the front, all before start
--   staged           records that are staged
--   staged_bytes     of the staged records
--   max_items        of the history at most
--   max_bytes        of all its items together at most
--   max_quarantined  of the quarantine at most
--   corrupt          indexes of unreadable records, separated by commas
--   record...        the rest of the replacement, after what is staged
-- RETURNS {DONE, generation}
-- REFUSES {FORGOTTEN} a repeat that is older than the operation log
--         {ABANDONED} an operation that its caller abandoned before it was done
--         {CONFLICT, generation} items were removed since they were read
--         {LOST, length} a staging list that does not have as many records
--         {FULL, length, bytes} a replacement that does not fit
-- USES common, operation_log, history

local items_key, history_key, operations_key, quarantine_key, staging_key = unpack(KEYS)
local operation_id, age_ms, ttl_ms = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local generation, start, stop = ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6])
local pruned, staged, staged_bytes = tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9])
local max_items, max_bytes = tonumber(ARGV[10]), tonumber(ARGV[11])
local max_quarantined, corrupt = tonumber(ARGV[12]), ARGV[13]
local FIRST = 14

-- Removes what was staged for nothing.
local function drop_staging(reply)
  redis.call('UNLINK', staging_key)
  return reply
end

local now_us = clock_us()
local log = read_log(operations_key, operation_id, age_ms, now_us)
if refuse_repeat(log) then return drop_staging(refuse_repeat(log)) end
if log.result then return drop_staging({DONE, log.result}) end

local state = load_history(history_key, items_key)
-- Generation 0 with nothing read is a history that did not exist: nothing can have been removed.
local is_of_nothing = generation == '0' and stop == 0
if not is_of_nothing and generation ~= whole(state.generation) or stop > state.length then
  return drop_staging({CONFLICT, whole(state.generation)})
end
local staging_length = redis.call('LLEN', staging_key)
if staging_length ~= staged then return {LOST, staging_length} end

local function slices(key, first, last, visit)
  for from = first, last, SLICE do
    visit(redis.call('LRANGE', key, from, math.min(from + SLICE - 1, last)))
  end
end

local kept = start - pruned
local bytes, length = 0, kept + staged + #ARGV - FIRST + 1 + state.length - stop
if kept == 0 then
  -- Items that are replaced are not read again: only items appended since are counted.
  slices(items_key, stop, state.length - 1, function(got) bytes = bytes + size_of(got, 1) end)
else
  bytes = state.bytes
  local function uncount(got) bytes = bytes - size_of(got, 1) end
  slices(items_key, 0, pruned - 1, uncount)
  slices(items_key, start, stop - 1, uncount)
end
bytes = bytes + staged_bytes + size_of(ARGV, FIRST)
if length > max_items or bytes > max_bytes then
  return drop_staging({FULL, state.length, state.bytes})
end

local unread = {}
for index in corrupt:gmatch('%d+') do
  unread[#unread + 1] = redis.call('LINDEX', items_key, index)
end
quarantine(quarantine_key, unread, max_quarantined, ttl_ms)
push(staging_key, ARGV, FIRST)
slices(items_key, stop, state.length - 1, function(records) push(staging_key, records, 1) end)
if kept == 0 then
  redis.call('UNLINK', items_key)
  if length > 0 then redis.call('RENAME', staging_key, items_key) end
else
  redis.call('LTRIM', items_key, pruned, start - 1)
  slices(staging_key, 0, length - kept - 1, function(records) push(items_key, records, 1) end)
  redis.call('DEL', staging_key)
end
state.bytes = bytes
save_history(history_key, items_key, state, now_us, ttl_ms, true)
write_log(operations_key, operation_id, whole(state.generation), log)
return {DONE, whole(state.generation)}
