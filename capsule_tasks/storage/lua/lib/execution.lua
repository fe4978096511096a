-- Shared by the scripts of executions: load the record, store events, close the record.
--
-- The record is a hash: `state` (running, waiting, ended), `attempt`, `seq`, `owner`, `claim`,
-- `ack`, `outcome`, times in milliseconds of Redis's clock (`claimed`, `ended`), and `task`,
-- `worker`, `group`, `index`. A stream costs more than everything else together, so an execution
-- has none until it has events besides claims, starts and ends, or over MAX_INLINE. Until then
-- `inline` lists the ids of its events, and each event is a field. `stream` is set together with
-- the stream: `content`, or `events` if there were only too many of them. `bytes` counts what the
-- stream was given. Trim points are places where the stream can be cut without reading it:
-- `trim<n>` is `<id>:<bytes before it>`, n from `low` to `high`. `first_kept_id` is where it was
-- cut last.

local MAX_INLINE = 12
local SLICE = 1000

local FIELDS = {'state', 'attempt', 'seq', 'owner', 'claim', 'inline', 'bytes', 'low', 'high',
  'ack', 'outcome', 'group', 'index', 'first_kept_id', 'stream'}

-- `limits` is text: bytes between two trim points, bytes retained while it runs and after its end;
-- milliseconds until it expires unfinished, after its end with content, and after it without.
local function load_execution(meta_key, limits)
  local got = redis.call('HMGET', meta_key, unpack(FIELDS))
  local meta = {changes = {}, now_ms = whole(math.floor(clock_us() / 1000))}
  for n, name in ipairs(FIELDS) do meta[name] = got[n] or nil end
  meta.attempt = tonumber(meta.attempt or 0)
  meta.seq = tonumber(meta.seq or 0)
  meta.bytes = tonumber(meta.bytes or 0)
  meta.low = tonumber(meta.low or 1)
  meta.high = tonumber(meta.high or 0)
  meta.inline = meta.inline or ''
  if limits then
    local trim_bytes, live_bytes, retention_bytes
    trim_bytes, live_bytes, retention_bytes, meta.unfinished_ms, meta.retention_ms, meta.silent_ms =
      limits:match('^(%d+) (%d+) (%d+) (%d+) (%d+) (%d+)$')
    meta.trim_bytes, meta.live_bytes = tonumber(trim_bytes), tonumber(live_bytes)
    meta.retention_bytes = tonumber(retention_bytes)
  end
  return meta
end

-- Adds fields that `close` writes.
local function change(meta, ...)
  local changes = meta.changes
  for n = 1, select('#', ...) do changes[#changes + 1] = select(n, ...) end
end

local function inline_ids(meta)
  local ids = {}
  for id in meta.inline:gmatch('%S+') do ids[#ids + 1] = id end
  return ids
end

local function to_stream(meta_key, events_key, meta, id, at_ms, payload)
  local last = meta.high >= meta.low and meta.last_trim_point or nil
  if not last and meta.high >= meta.low then
    local point = redis.call('HGET', meta_key, 'trim' .. meta.high)
    last = point and tonumber(point:match(':(%d+)$')) or 0
  end
  if not last or meta.bytes - last >= meta.trim_bytes then
    meta.high = meta.high + 1
    meta.last_trim_point = meta.bytes
    redis.call('HSET', meta_key, 'trim' .. meta.high, id .. ':' .. whole(meta.bytes))
  else
    meta.last_trim_point = last
  end
  redis.call('XADD', events_key, id, 'a', at_ms, 'd', payload)
  meta.bytes = meta.bytes + #payload
end

local function move_to_stream(meta_key, events_key, meta, stream)
  local ids = inline_ids(meta)
  for _, id in ipairs(ids) do
    local at_ms, payload = (meta[id] or redis.call('HGET', meta_key, id)):match('^(%d+):(.*)$')
    to_stream(meta_key, events_key, meta, id, at_ms, payload)
    redis.call('HDEL', meta_key, id)
  end
  if #ids > 0 then redis.call('HDEL', meta_key, 'inline') end
  meta.inline = ''
  meta.stream = stream
end

-- Stores payloads[from..to] as the next events of the attempt; `close` writes inline events.
local function store(meta_key, events_key, meta, payloads, from, to, has_stream_content)
  local at_ms = meta.now_ms
  local ids = meta.inline == '' and {} or inline_ids(meta)
  if has_stream_content and meta.stream ~= 'content' then
    move_to_stream(meta_key, events_key, meta, 'content')
  elseif not meta.stream and #ids + to - from + 1 > MAX_INLINE then
    move_to_stream(meta_key, events_key, meta, 'events')
  end
  for n = from, to do
    meta.seq = meta.seq + 1
    local id = whole(meta.attempt) .. '-' .. meta.seq
    if meta.stream then
      to_stream(meta_key, events_key, meta, id, at_ms, payloads[n])
    else
      meta[id] = at_ms .. ':' .. payloads[n]
      meta.inline = meta.inline == '' and id or meta.inline .. ' ' .. id
    end
  end
end

-- The id at a trim point, and how many bytes the stream was given from there on.
local function behind_trim_point(meta_key, meta, n)
  local id, before = redis.call('HGET', meta_key, 'trim' .. n):match('^(.*):(%d+)$')
  return id, meta.bytes - tonumber(before)
end

local function drop_trim_points(meta_key, from, to)
  for first = from, to, SLICE do
    local names = {}
    for n = first, math.min(first + SLICE - 1, to) do names[#names + 1] = 'trim' .. n end
    redis.call('HDEL', meta_key, unpack(names))
  end
end

-- Drops the oldest events, up to the first trim point after which no more than `max_bytes` bytes
-- are left, else up to the last one. Callers bound how many trim points there can be.
local function trim(meta_key, events_key, meta, max_bytes)
  if not meta.stream or meta.bytes <= max_bytes or meta.low >= meta.high then return end
  local _, left = behind_trim_point(meta_key, meta, meta.low)
  if left <= max_bytes then return end
  local from, low, high = meta.low, meta.low + 1, meta.high
  local middle = low -- while it runs, the next point is usually enough
  while low < high do
    _, left = behind_trim_point(meta_key, meta, middle)
    if left <= max_bytes then high = middle else low = middle + 1 end
    middle = math.floor((low + high) / 2)
  end
  local cut = behind_trim_point(meta_key, meta, low)
  meta.low = low
  redis.call('XTRIM', events_key, 'MINID', cut)
  drop_trim_points(meta_key, from, low - 1)
  redis.call('HSET', meta_key, 'low', low, 'first_kept_id', cut)
end

-- Writes the record as it is now, with the end of the attempt (`waiting`) or of the execution
-- (`ended`), and sets when everything expires. An ended execution with content is retained
-- longest.
local function close(meta_key, events_key, control_key, meta, state, outcome)
  change(meta, 'seq', meta.seq)
  if meta.stream then
    change(meta, 'stream', meta.stream, 'bytes', whole(meta.bytes), 'low', meta.low,
      'high', meta.high)
  else
    change(meta, 'inline', meta.inline)
    for _, id in ipairs(inline_ids(meta)) do
      if meta[id] then change(meta, id, meta[id]) end
    end
  end
  if state ~= '' then change(meta, 'state', state) end
  if state == 'ended' then change(meta, 'outcome', outcome, 'ended', meta.now_ms) end
  redis.call('HSET', meta_key, unpack(meta.changes))
  if state ~= '' and meta.owner then redis.call('HDEL', meta_key, 'owner') end
  trim(meta_key, events_key, meta, state == 'ended' and meta.retention_bytes or meta.live_bytes)
  local ttl_ms = meta.unfinished_ms
  if state == 'ended' then
    ttl_ms = meta.stream == 'content' and meta.retention_ms or meta.silent_ms
  end
  redis.call('PEXPIRE', meta_key, ttl_ms)
  if meta.stream then redis.call('PEXPIRE', events_key, ttl_ms) end
  redis.call('PEXPIRE', control_key, state == 'ended' and meta.silent_ms or meta.unfinished_ms)
end

local function control_entries(control_key, after)
  local flat = {}
  local start = after == '' and '-' or '(' .. after
  for _, entry in ipairs(redis.call('XRANGE', control_key, start, '+', 'COUNT', 1000)) do
    flat[#flat + 1] = entry[1]
    flat[#flat + 1] = entry[2][4]
  end
  return flat
end
