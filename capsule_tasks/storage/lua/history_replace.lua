-- Puts a replacement in the place of the items that its writer has read, in one step.
--
-- What stood before those items stays before it, but for the oldest records where the writer prunes
-- them. What was appended since stays behind it, and records in between that the writer could not
-- read go to quarantine.
--
-- KEYS
--   items    list  capsule:{S:<session>}:items
--   history  hash  capsule:{S:<session>}:history
--   batches  hash  capsule:{S:<session>}:batches
--   bad      list  capsule:{S:<session>}:bad
--   stage    list  capsule:{S:<session>}:stage:<operation>
-- ARGV
--   operation   id of this write
--   age_ms      since it was first sent; 0 the first time
--   ttl_ms      until the history expires
--   generation  that was read
--   start       index of the first item read
--   stop        index behind the last item read
--   pruned      records to remove from the front; none of those read
--   staged      records that wait in the stage
--   staged_bytes  that they have together
--   max_items   that the history may hold
--   max_bytes   that its items may have together
--   keep_bad    records that the quarantine holds at most
--   corrupt     indexes of records that could not be read, separated by commas
--   record...   the rest of the replacement, behind the stage
-- RETURNS {DONE, generation}
-- REFUSES {FORGOTTEN} a repeat that the memory does not reach back to
--         {GIVEN_UP} an operation that was settled before it was done
--         {CONFLICT, generation} items were removed since they were read
--         {LOST, length} a stage that is not what was staged
--         {FULL, length, bytes} a replacement that does not fit
-- USES once, history

local items_key, history_key, batches_key, bad_key, stage_key = unpack(KEYS)
local operation, age_ms, ttl_ms = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local generation, start, stop = ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6])
local pruned, staged, staged_bytes = tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9])
local max_items, max_bytes = tonumber(ARGV[10]), tonumber(ARGV[11])
local keep_bad, corrupt = tonumber(ARGV[12]), ARGV[13]
local FIRST = 14

-- What was staged for nothing goes at once.
local function without_stage(reply)
  redis.call('UNLINK', stage_key)
  return reply
end

local now_us = clock_us()
local memory = recall(batches_key, operation, age_ms, now_us)
if barred(memory) then return without_stage(barred(memory)) end
if memory.result then return without_stage({DONE, memory.result}) end

local state = load_history(history_key, items_key)
-- Generation 0 with nothing read is a history that did not exist: nothing of it can have gone.
local is_of_nothing = generation == '0' and stop == 0
if not is_of_nothing and generation ~= whole(state.generation) or stop > state.length then
  return without_stage({CONFLICT, whole(state.generation)})
end
local stage_length = redis.call('LLEN', stage_key)
if stage_length ~= staged then return {LOST, stage_length} end

local function slices(key, first, last, visit)
  for from = first, last, SLICE do
    visit(redis.call('LRANGE', key, from, math.min(from + SLICE - 1, last)))
  end
end

local kept = start - pruned
local bytes, length = 0, kept + staged + #ARGV - FIRST + 1 + state.length - stop
if kept == 0 then
  -- What is replaced is not read again, however much it is: only what was appended since.
  slices(items_key, stop, state.length - 1, function(got) bytes = bytes + size_of(got, 1) end)
else
  bytes = state.bytes
  local function uncount(got) bytes = bytes - size_of(got, 1) end
  slices(items_key, 0, pruned - 1, uncount)
  slices(items_key, start, stop - 1, uncount)
end
bytes = bytes + staged_bytes + size_of(ARGV, FIRST)
if length > max_items or bytes > max_bytes then
  return without_stage({FULL, state.length, state.bytes})
end

local unread = {}
for index in corrupt:gmatch('%d+') do
  unread[#unread + 1] = redis.call('LINDEX', items_key, index)
end
quarantine(bad_key, unread, keep_bad, ttl_ms)
push(stage_key, ARGV, FIRST)
slices(items_key, stop, state.length - 1, function(records) push(stage_key, records, 1) end)
if kept == 0 then
  redis.call('UNLINK', items_key)
  if length > 0 then redis.call('RENAME', stage_key, items_key) end
else
  redis.call('LTRIM', items_key, pruned, start - 1)
  slices(stage_key, 0, length - kept - 1, function(records) push(items_key, records, 1) end)
  redis.call('DEL', stage_key)
end
state.bytes = bytes
save_history(history_key, items_key, state, now_us, ttl_ms, true)
remember(batches_key, operation, whole(state.generation), memory)
return {DONE, whole(state.generation)}
