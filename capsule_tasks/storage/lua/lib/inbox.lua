-- Shared by the scripts that send something to an owner: a bounded stream, each id in it once.

-- No more than a claim reads, because a claim has to see the newest.
local MAX_UNREAD, LOOK_BACK = 1000, 32

-- Appends the data under its id, unless the id was among the latest.
local function append_once(stream_key, id_field, id, data, ttl_ms)
  for _, entry in ipairs(redis.call('XREVRANGE', stream_key, '+', '-', 'COUNT', LOOK_BACK)) do
    if entry[2][2] == id then return end
  end
  redis.call('XADD', stream_key, 'MAXLEN', MAX_UNREAD, '*', id_field, id, 'd', data)
  redis.call('PEXPIRE', stream_key, ttl_ms)
end
