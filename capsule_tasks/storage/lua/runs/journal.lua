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
--   max_bytes  of all replies of one turn
--   key        of the reply; another reply under it is replaced
--   reply      opaque
-- RETURNS {DONE, cancel}
-- REFUSES {MISSING} a run that does not exist
--         {STALE, status, token} a claim that is over
--         {CONFLICT, revision, turn} another revision
--         {FULL, bytes} a reply that does not fit
-- USES common, run

local run_key, journal_key = KEYS[1], KEYS[2]
local ttl_ms, token, revision = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local max_bytes, key, reply = tonumber(ARGV[4]), ARGV[5], ARGV[6]

local run = load_run(run_key)
if not run then return {MISSING} end
if run.token ~= token or run.status ~= 'running' then
  return {STALE, run.status, whole(run.token)}
end
if run.revision ~= revision then return {CONFLICT, run.revision, run.turn} end
local replies = {key, reply}
local bytes = journal_bytes_with(run_key, journal_key, replies, 1)
if bytes > max_bytes then return {FULL, bytes} end

add_to_journal(run_key, journal_key, replies, 1, bytes, ttl_ms)
return {DONE, run.cancel}
