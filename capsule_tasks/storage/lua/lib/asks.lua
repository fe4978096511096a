-- Calls that wait for a decision. They are in the index before they are here; an index entry that
-- finds no call here is dropped after two minutes, so none may be written here much later.

local INDEX_VALID_MS = 30000

local function is_late(asks, indexed_ms, now_us)
  return #asks > 0 and math.floor(now_us / 1000) - indexed_ms > INDEX_VALID_MS
end

-- The id of a call that is asked for again as another call; nil if there is none.
local function changed_call(ledger_key, asks)
  for _, ask in ipairs(asks) do
    for _, kind in ipairs({'ask:', 'dec:', 'call:'}) do
      local known = entry_of(ledger_key, kind .. ask.call)
      if known and known.print ~= ask.print then return ask.call end
    end
  end
  return nil
end

-- These calls wait, and no others. One that waits already keeps its time and its limits.
local function ask_for(ledger_key, run, asks, now_us)
  local wanted = {}
  for _, ask in ipairs(asks) do wanted[ask.call] = true end
  for _, call in ipairs(run.pending) do
    if not wanted[call] then redis.call('HDEL', ledger_key, 'ask:' .. call) end
  end
  run.pending = {}
  for _, ask in ipairs(asks) do
    run.pending[#run.pending + 1] = ask.call
    local field = 'ask:' .. ask.call
    ask.is_new = redis.call('HEXISTS', ledger_key, field) == 0
    if ask.is_new then
      ask.at = math.floor(now_us / 1000)
      if ask.expires_in then ask.expires = ask.at + ask.expires_in end
      local kept = {}
      for name, value in pairs(ask) do
        if name ~= 'is_new' and name ~= 'expires_in' then kept[name] = value end
      end
      redis.call('HSET', ledger_key, field, cmsgpack.pack(kept))
    end
  end
end

local function announce_asks(channel, run_id, asks)
  for _, ask in ipairs(asks) do
    if ask.is_new then announce(channel, 'requested', run_id, ask.call, '') end
  end
end
