"""A run whose processes die one after the other, in forked processes on a real server."""

from __future__ import annotations

import json
import os

import redis

from capsule_tasks import SyncHistory
from capsule_tasks.durable import RunDriver, TurnWork
from capsule_tasks.settings import HistorySettings, RunSettings
from capsule_tasks.storage import RunStore, SyncRunStore
from capsule_tasks.storage.runs.store import SyncLease
from tests.integration.killing import KILLED, LASTING, runs_to_its_end
from tests.integration.test_run_driver import ScriptedEngine


class CrashingEngine(ScriptedEngine):
    """Its word `exit` ends the process, as code of a guardrail may."""

    async def _do(self, work: TurnWork, verb: str, name: str) -> str:
        if verb == "exit":
            os._exit(KILLED)
        return await super()._do(work, verb, name)


def test_a_run_that_kills_each_process_fails_in_the_end(valkey_url: str, prefix: str) -> None:
    settings = RunSettings(prefix=prefix)
    store = SyncRunStore(valkey_url, settings=settings)
    store.create("r", "user-42", b"0", schema="script/1", agent="a")

    def drive(worker: str) -> bool:
        async def main() -> None:
            async with RunStore(valkey_url, settings=settings) as own:
                engine = CrashingEngine([["model"], ["model", "exit"]])
                engine.redis = redis.Redis.from_url(valkey_url)
                engine.effects_key = f"{prefix}:effects"
                await RunDriver(own, worker, loss_limit=3).drive("r", engine)

        with SyncLease(worker, valkey_url, settings=LASTING, prefix=prefix) as lease:
            lease.acquire()
            is_done = runs_to_its_end(main, None)
            lease.release()
        return is_done

    # The first three lose their process, each in the second turn, whose model was asked once.
    assert [drive(f"w{number}") for number in range(4)] == [False, False, False, True]
    with redis.Redis.from_url(valkey_url) as client:
        assert client.lrange(f"{prefix}:effects:asked", 0, -1) == [b"0", b"1"]
    record = store.read("r")
    store.close()
    assert record.status == "failed"
    assert json.loads(record.error) == {
        "kind": "lost",
        "type": "TooManyLosses",
        "message": "3 processes were lost, one after the other, in turn 2; the limit is 3",
    }
    with SyncHistory("user-42", valkey_url, settings=HistorySettings(prefix=prefix)) as history:
        assert [item["turn"] for item in history.get_items()] == [0]
