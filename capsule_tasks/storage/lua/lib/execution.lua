-- What every script of an execution does alike: read its record, store events, end it.
--
-- The record is a hash: `state` (running, waiting, ended), `attempt`, `seq`, `owner`, `claim`,
-- `ack`, `outcome`, times in milliseconds of Redis's clock (`begun`, `over`), what it is (`task`,
-- `worker`, `group`, `index`). While nothing but a few quiet events were said there is no stream,
-- which costs more than all else together: `quiet` lists their ids, and each is a field.
-- `bytes` counts what the stream was given; `mark<n>` is `<id>:<bytes before it>`, from `low` to
-- `high`, so that the oldest can be trimmed by size unread. `gone` is the first id that is left.

local MOST_QUIET = 12
local MOST_STEPS = 256

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
    local mark_bytes, live_bytes, kept_bytes
    mark_bytes, live_bytes, kept_bytes, meta.age_ms, meta.kept_ms, meta.quiet_ms =
      limits:match('^(%d+) (%d+) (%d+) (%d+) (%d+) (%d+)$')
    meta.mark_bytes, meta.live_bytes = tonumber(mark_bytes), tonumber(live_bytes)
    meta.kept_bytes = tonumber(kept_bytes)
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

local function wake_stream(meta_key, events_key, meta)
  local ids = quiet_ids(meta)
  for _, id in ipairs(ids) do
    local at_ms, payload = (meta[id] or redis.call('HGET', meta_key, id)):match('^(%d+):(.*)$')
    to_stream(meta_key, events_key, meta, id, at_ms, payload)
    redis.call('HDEL', meta_key, id)
  end
  if #ids > 0 then redis.call('HDEL', meta_key, 'quiet') end
  meta.quiet = ''
  meta.loud = '1'
end

-- Stores payloads[from..to] as the next events of the attempt; `close` writes what is quiet.
local function store(meta_key, events_key, meta, payloads, from, to, is_loud)
  local at_ms = meta.now_ms
  local ids = meta.quiet == '' and {} or quiet_ids(meta)
  if not meta.loud and (is_loud or #ids + to - from + 1 > MOST_QUIET) then
    wake_stream(meta_key, events_key, meta)
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

-- Drops the oldest events until about `most` bytes are left, mark by mark.
local function trim(meta_key, events_key, meta, most)
  if not meta.loud or meta.bytes <= most then return end
  local from, cut = meta.low, nil
  for _ = 1, MOST_STEPS do
    if meta.low >= meta.high then break end
    local mark = redis.call('HGET', meta_key, 'mark' .. (meta.low + 1))
    local id, before = mark:match('^(.*):(%d+)$')
    local kept = redis.call('HGET', meta_key, 'mark' .. meta.low):match(':(%d+)$')
    if meta.bytes - tonumber(kept) <= most then break end
    meta.low, cut = meta.low + 1, id
  end
  if not cut then return end
  redis.call('XTRIM', events_key, 'MINID', cut)
  for place = from, meta.low - 1 do redis.call('HDEL', meta_key, 'mark' .. place) end
  redis.call('HSET', meta_key, 'low', meta.low, 'gone', cut)
end

-- Writes the record as it is now, with the end of the attempt (`waiting`) or of the execution
-- (`ended`), and makes all of it expire: what the stream of an ended execution holds later.
local function close(meta_key, events_key, control_key, meta, state, outcome)
  change(meta, 'seq', meta.seq)
  if meta.loud then
    change(meta, 'loud', '1', 'bytes', whole(meta.bytes), 'low', meta.low, 'high', meta.high)
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
  trim(meta_key, events_key, meta, state == 'ended' and meta.kept_bytes or meta.live_bytes)
  local keep_ms = meta.age_ms
  if state == 'ended' then keep_ms = meta.loud and meta.kept_ms or meta.quiet_ms end
  redis.call('PEXPIRE', meta_key, keep_ms)
  if meta.loud then redis.call('PEXPIRE', events_key, keep_ms) end
  redis.call('PEXPIRE', control_key, state == 'ended' and meta.quiet_ms or meta.age_ms)
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
