-- Counts the sessions that are wanted, and who listens to their list: workers that host them.
--
-- KEYS
--   wanted  zset  capsule:{wanted:<profile>}
-- ARGV
--   channel  that hosts listen to
-- RETURNS {DONE, sessions, hosts}; hosts is -1 where the server cannot know: each node of a
--         cluster knows its own listeners only
-- REFUSES nothing
-- USES common

local wanted_key = KEYS[1]
local channel = ARGV[1]

local listening = redis.pcall('PUBSUB', 'NUMSUB', channel)
local hosts = not listening.err and tonumber(listening[2]) or -1
if hosts == 0 then
  local info = redis.pcall('INFO', 'cluster')
  if type(info) == 'table' or info:find('cluster_enabled:1', 1, true) then hosts = -1 end
end
return {DONE, redis.call('ZCARD', wanted_key), hosts}
