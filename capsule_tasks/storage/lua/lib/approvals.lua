-- Calls that wait for an approval, in the ledger of their run. A call is put into the index of
-- approvals before it is written here.

local function is_late(requests, indexed_ms, now_us)
  return #requests > 0 and is_outdated(indexed_ms, now_us)
end

-- The id of a requested call that is known with another fingerprint; nil if there is none.
local function changed_call(ledger_key, requests)
  for _, request in ipairs(requests) do
    for _, kind in ipairs({'approval:', 'decision:', 'call:'}) do
      local known = entry_of(ledger_key, kind .. request.call)
      if known and known.fingerprint ~= request.fingerprint then return request.call end
    end
  end
  return nil
end

-- Makes these the calls that wait. A call that waits already keeps its times and its limits.
local function request_approvals(ledger_key, run, requests, now_us)
  local wanted = {}
  for _, request in ipairs(requests) do wanted[request.call] = true end
  for _, call in ipairs(run.pending) do
    if not wanted[call] then redis.call('HDEL', ledger_key, 'approval:' .. call) end
  end
  run.pending = {}
  for _, request in ipairs(requests) do
    run.pending[#run.pending + 1] = request.call
    local field = 'approval:' .. request.call
    request.is_new = redis.call('HEXISTS', ledger_key, field) == 0
    if request.is_new then
      request.at = math.floor(now_us / 1000)
      if request.expires_in then request.expires = request.at + request.expires_in end
      local stored = {}
      for name, value in pairs(request) do
        if name ~= 'is_new' and name ~= 'expires_in' then stored[name] = value end
      end
      redis.call('HSET', ledger_key, field, cmsgpack.pack(stored))
    end
  end
end

local function announce_requests(channel, run_id, requests)
  for _, request in ipairs(requests) do
    if request.is_new then announce(channel, 'requested', run_id, request.call, '') end
  end
end
