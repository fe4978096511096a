-- Shared by the scripts of an index whose entries have two names, such as agent and tool. Each
-- entry is in four orders by the time when it was added: that of all entries, of either name, of
-- both; and in one more, where the index has it. Some are due at a time. `entries` has the details of each (`d<member>`) and when it was
-- last added (`t<member>`, in microseconds).
--
-- A change is added before it is made, so the index may hold too much for a while, never too
-- little: a reader drops an entry that is wrong, unless it was added less than two minutes ago, and
-- the script that makes the change refuses to do so more than 30 s after it was added.

local INDEX_VALID_MS = 30000

local function is_outdated(indexed_ms, now_us)
  return math.floor(now_us / 1000) - indexed_ms > INDEX_VALID_MS
end

-- Adds ARGV[first..]: member, details, ms until it is due (0: never), and so on. `due_mode` is NX
-- to keep the time when an entry is due already, LT to keep the earlier one.
local function add_to_index(all_key, due_key, entries_key, one_key, other_key, both_key, ttl_ms,
  first, due_mode, more_key)
  local now_us = clock_us()
  local newest = redis.call('ZREVRANGE', all_key, 0, 0, 'WITHSCORES')[2]
  local score = math.max(now_us, tonumber(newest or 0) + 1)
  for index = first, #ARGV, 3 do
    local member, details, due_in_ms = ARGV[index], ARGV[index + 1], tonumber(ARGV[index + 2])
    local position = redis.call('ZSCORE', all_key, member) or whole(score)
    for _, key in ipairs({all_key, one_key, other_key, both_key, more_key}) do
      redis.call('ZADD', key, position, member)
    end
    if due_in_ms > 0 then
      redis.call('ZADD', due_key, due_mode, whole(math.floor(now_us / 1000) + due_in_ms), member)
    end
    redis.call('HSET', entries_key, 'd' .. member, details, 't' .. member, whole(now_us))
    score = score + 1
  end
  for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, ttl_ms) end
  return {DONE, whole(math.floor(now_us / 1000))}
end

-- Removes an entry, unless it was added less than `idle_ms` ago, or at `before_ms` or later.
local function drop_from_index(all_key, due_key, entries_key, one_key, other_key, both_key, member,
  idle_ms, before_ms, more_key)
  local put_us = tonumber(redis.call('HGET', entries_key, 't' .. member) or 0)
  if clock_us() - put_us < idle_ms * 1000 then return {DONE, 0} end
  if before_ms and put_us >= before_ms * 1000 then return {DONE, 0} end
  for _, key in ipairs({all_key, due_key, one_key, other_key, both_key, more_key}) do
    redis.call('ZREM', key, member)
  end
  redis.call('HDEL', entries_key, 'd' .. member, 't' .. member)
  return {DONE, 1}
end

-- Entries that were found `WITHSCORES`: member, score, details, and so on.
local function index_page(entries_key, found)
  local reply = {DONE}
  for index = 1, #found, 2 do
    local details = redis.call('HGET', entries_key, 'd' .. found[index])
    reply[#reply + 1] = found[index]
    reply[#reply + 1] = whole(tonumber(found[index + 1]))
    reply[#reply + 1] = details or ''
  end
  return reply
end

-- Entries that are due, after the milliseconds until the next one is, or -1.
local function due_in_index(due_key, entries_key, count)
  local now_ms = math.floor(clock_us() / 1000)
  local found = redis.call('ZRANGEBYSCORE', due_key, '-inf', whole(now_ms), 'LIMIT', 0, count)
  local later = redis.call('ZRANGEBYSCORE', due_key, '(' .. whole(now_ms), '+inf', 'WITHSCORES',
    'LIMIT', 0, 1)
  local reply = {DONE, later[2] and tonumber(later[2]) - now_ms or -1}
  for _, member in ipairs(found) do
    reply[#reply + 1] = member
    reply[#reply + 1] = redis.call('HGET', entries_key, 'd' .. member) or ''
  end
  return reply
end

local function postpone_in_index(due_key, member, at_ms, min_ms)
  local now_ms = math.floor(clock_us() / 1000)
  local later_ms = math.max(at_ms, now_ms + min_ms)
  redis.call('ZADD', due_key, 'XX', whole(later_ms), member)
  return {DONE, later_ms - now_ms}
end
