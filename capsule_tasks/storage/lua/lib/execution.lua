-- What every script of an execution does alike: read its record, store events, end it.
--
-- The record is a hash: `state` (running, waiting, ended), `attempt`, `seq`, `owner`, `claim`,
-- `ack`, `outcome`, times in milliseconds of Redis's clock (`begun`, `over`), what it is (`task`,
-- `worker`, `group`, `index`). While nothing but a few quiet events were said there is no stream,
-- which costs more than all else together: `quiet` lists their ids, and each is a field. `loud` is
-- there with the stream: `1` if something was said, `0` if there were only too many quiet events.
-- `bytes` counts what the stream was given; `mark<n>` is `<id>:<bytes before it>`, from `low` to
-- `high`, so that the oldest can be trimmed by size unread. `gone` is the first id that is left.

local MOST_QUIET = 12
local SLICE = 1000

local FIELDS = {'state', 'attempt', 'seq', 'owner', 'claim', 'quiet', 'bytes', 'low', 'high',
  'ack', 'outcome', 'group', 'index', 'gone', 'loud'}

-- `limits` is text: bytes between two marks, kept while it runs, after its end; milliseconds until
-- all of it expires, kept after its end, and of what said nothing.
local function load_execution(meta_key, limits)
  local got = redis.call('HMGET', meta_key, unpack(FIELDS))
  local meta = {changes = {}, now_ms = whole(math.floor(clock_us() / 1000))}
  for place, name in ipairs(FIELDS) do meta[name] = got[place] or nil end
  meta.attempt = tonumber(meta.attempt or 0)
  meta.seq = tonumber(meta.seq or 0)
  meta.bytes = tonumber(meta.bytes or 0)
  meta.low = tonumber(meta.low or 1)
  meta.high = tonumber(meta.high or 0)
  meta.quiet = meta.quiet or ''
  if limits then
    local mark_bytes, live_bytes, retention_bytes
    mark_bytes, live_bytes, retention_bytes, meta.unfinished_ttl_ms, meta.retention_ms,
      meta.silent_retention_ms = limits:match('^(%d+) (%d+) (%d+) (%d+) (%d+) (%d+)$')
    meta.mark_bytes, meta.live_bytes = tonumber(mark_bytes), tonumber(live_bytes)
    meta.retention_bytes = tonumber(retention_bytes)
  end
  return meta
end

-- What `close` writes.
local function change(meta, ...)
  local changes = meta.changes
  for place = 1, select('#', ...) do changes[#changes + 1] = select(place, ...) end
end

local function quiet_ids(meta)
  local ids = {}
  for id in meta.quiet:gmatch('%S+') do ids[#ids + 1] = id end
  return ids
end

local function to_stream(meta_key, events_key, meta, id, at_ms, payload)
  local last = meta.high >= meta.low and meta.last_mark or nil
  if not last and meta.high >= meta.low then
    local mark = redis.call('HGET', meta_key, 'mark' .. meta.high)
    last = mark and tonumber(mark:match(':(%d+)$')) or 0
  end
  if not last or meta.bytes - last >= meta.mark_bytes then
    meta.high = meta.high + 1
    meta.last_mark = meta.bytes
    redis.call('HSET', meta_key, 'mark' .. meta.high, id .. ':' .. whole(meta.bytes))
  else
    meta.last_mark = last
  end
  redis.call('XADD', events_key, id, 'a', at_ms, 'd', payload)
  meta.bytes = meta.bytes + #payload
end

local function wake_stream(meta_key, events_key, meta, loud)
  local ids = quiet_ids(meta)
  for _, id in ipairs(ids) do
    local at_ms, payload = (meta[id] or redis.call('HGET', meta_key, id)):match('^(%d+):(.*)$')
    to_stream(meta_key, events_key, meta, id, at_ms, payload)
    redis.call('HDEL', meta_key, id)
  end
  if #ids > 0 then redis.call('HDEL', meta_key, 'quiet') end
  meta.quiet = ''
  meta.loud = loud
end

-- Stores payloads[from..to] as the next events of the attempt; `close` writes what is quiet.
local function store(meta_key, events_key, meta, payloads, from, to, has_stream_content)
  local at_ms = meta.now_ms
  local ids = meta.quiet == '' and {} or quiet_ids(meta)
  if has_stream_content and meta.loud ~= '1' then
    wake_stream(meta_key, events_key, meta, '1')
  elseif not meta.loud and #ids + to - from + 1 > MOST_QUIET then
    wake_stream(meta_key, events_key, meta, '0')
  end
  for place = from, to do
    meta.seq = meta.seq + 1
    local id = whole(meta.attempt) .. '-' .. meta.seq
    if meta.loud then
      to_stream(meta_key, events_key, meta, id, at_ms, payloads[place])
    else
      meta[id] = at_ms .. ':' .. payloads[place]
      meta.quiet = meta.quiet == '' and id or meta.quiet .. ' ' .. id
    end
  end
end

-- The id at a mark, and how many bytes there are behind it.
local function behind_mark(meta_key, meta, place)
  local id, before = redis.call('HGET', meta_key, 'mark' .. place):match('^(.*):(%d+)$')
  return id, meta.bytes - tonumber(before)
end

local function drop_marks(meta_key, from, to)
  for first = from, to, SLICE do
    local names = {}
    for place = first, math.min(first + SLICE - 1, to) do names[#names + 1] = 'mark' .. place end
    redis.call('HDEL', meta_key, unpack(names))
  end
end

-- Drops the oldest events, from the first mark on behind which no more than `most` bytes are left,
-- else from the last one. Callers bound how many marks there can be.
local function trim(meta_key, events_key, meta, most)
  if not meta.loud or meta.bytes <= most or meta.low >= meta.high then return end
  local _, left = behind_mark(meta_key, meta, meta.low)
  if left <= most then return end
  local from, low, high = meta.low, meta.low + 1, meta.high
  local middle = low -- while it runs, the next one is mostly enough
  while low < high do
    _, left = behind_mark(meta_key, meta, middle)
    if left <= most then high = middle else low = middle + 1 end
    middle = math.floor((low + high) / 2)
  end
  local cut = behind_mark(meta_key, meta, low)
  meta.low = low
  redis.call('XTRIM', events_key, 'MINID', cut)
  drop_marks(meta_key, from, low - 1)
  redis.call('HSET', meta_key, 'low', low, 'gone', cut)
end

-- Writes the record as it is now, with the end of the attempt (`waiting`) or of the execution
-- (`ended`), and makes all of it expire: what the stream of an ended execution holds later.
local function close(meta_key, events_key, control_key, meta, state, outcome)
  change(meta, 'seq', meta.seq)
  if meta.loud then
    change(meta, 'loud', meta.loud, 'bytes', whole(meta.bytes), 'low', meta.low, 'high', meta.high)
  else
    change(meta, 'quiet', meta.quiet)
    for _, id in ipairs(quiet_ids(meta)) do
      if meta[id] then change(meta, id, meta[id]) end
    end
  end
  if state ~= '' then change(meta, 'state', state) end
  if state == 'ended' then change(meta, 'outcome', outcome, 'over', meta.now_ms) end
  redis.call('HSET', meta_key, unpack(meta.changes))
  if state ~= '' and meta.owner then redis.call('HDEL', meta_key, 'owner') end
  trim(meta_key, events_key, meta, state == 'ended' and meta.retention_bytes or meta.live_bytes)
  local ttl_ms, control_ttl_ms = meta.unfinished_ttl_ms, meta.unfinished_ttl_ms
  if state == 'ended' then
    control_ttl_ms = meta.silent_retention_ms
    ttl_ms = meta.loud == '1' and meta.retention_ms or meta.silent_retention_ms
  end
  redis.call('PEXPIRE', meta_key, ttl_ms)
  if meta.loud then redis.call('PEXPIRE', events_key, ttl_ms) end
  redis.call('PEXPIRE', control_key, control_ttl_ms)
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
