-- Erases a run, whatever its status; its owner is refused all that it writes after that.
--
-- KEYS
--   run      hash  capsule:{S:<session>}:run:<run>
--   ledger   hash  capsule:{S:<session>}:run:<run>:ledger
--   journal  hash  capsule:{S:<session>}:run:<run>:journal
-- ARGV
--   ttl_ms  how long the run cannot be created again
-- RETURNS {DONE, dropped}; dropped are calls that wait no more, each with its agent and tool, in
--         MessagePack
-- REFUSES nothing
-- USES common, run

local run_key, ledger_key, journal_key = KEYS[1], KEYS[2], KEYS[3]
local ttl_ms = ARGV[1]

local run = load_run(run_key)
local dropped = run and waiting_calls(ledger_key, run) or {}
redis.call('UNLINK', run_key, ledger_key, journal_key)
redis.call('HSET', run_key, 'status', DELETED)
redis.call('PEXPIRE', run_key, ttl_ms)
redis.call('PUBLISH', run_key .. ':changed', '')
return {DONE, cmsgpack.pack(dropped)}
