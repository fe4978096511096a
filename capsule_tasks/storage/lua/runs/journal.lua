-- Records a reply of a model, so that the turn does not ask for it again after a crash.
--
-- A reply is recorded under the revision at which its turn began: one that arrives late is no part
-- of the next turn. The commit of the turn erases all replies.
--
-- KEYS
--   run      hash  capsule:{S:<session>}:run:<run>
--   journal  hash  capsule:{S:<session>}:run:<run>:journal
-- ARGV
--   ttl_ms     until the replies expire
--   token      of the owner's claim
--   revision   that the owner has read
--   key        of the reply; another reply under it is replaced
--   reply      opaque
--   max_bytes  of all replies of one turn
-- RETURNS {DONE, cancel}
-- REFUSES {MISSING} a run that does not exist
--         {STALE, status, token} a claim that is over
--         {CONFLICT, revision, turn} another revision
--         {FULL, bytes} a reply that does not fit
-- USES common, run

local run_key, journal_key = KEYS[1], KEYS[2]
local ttl_ms, token, revision = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local key, reply, max_bytes = ARGV[4], ARGV[5], tonumber(ARGV[6])

local run = load_run(run_key)
if not run then return {MISSING} end
if run.token ~= token or run.status ~= 'running' then
  return {STALE, run.status, whole(run.token)}
end
if run.revision ~= revision then return {CONFLICT, run.revision, run.turn} end
local bytes = tonumber(redis.call('HGET', run_key, 'journal_bytes') or 0)
bytes = bytes - redis.call('HSTRLEN', journal_key, key) + #reply
if bytes > max_bytes then return {FULL, bytes} end

redis.call('HSET', journal_key, key, reply)
redis.call('PEXPIRE', journal_key, ttl_ms)
redis.call('HSET', run_key, 'journal_bytes', whole(bytes))
return {DONE, run.cancel}
