"""`send_command`, and `commands` which reads what was sent."""

from __future__ import annotations

from capsule_tasks.storage.scripts import Code
from tests.lua.executions.bench import Bench


def test_a_command_is_kept_once_and_rings_the_owner(bench: Bench) -> None:
    bench.claim()
    with bench.client.pubsub() as doorbell:
        doorbell.subscribe(f"{bench.prefix}:bell:w1")
        assert doorbell.get_message(timeout=10)["type"] == "subscribe"
        assert bench.control("k1") == [Code.DONE, b"running"]
        assert bench.control("k1") == [Code.DONE, b"running"]
        assert doorbell.get_message(timeout=10)["data"] == b"e"
    reply = bench.call("executions/commands", "")
    assert reply[2:] == [b"CANCEL"]
    assert bench.call("executions/commands", reply[1]) == [Code.DONE]


def test_a_command_rings_every_worker_where_no_owner_is_known(bench: Bench) -> None:
    with bench.client.pubsub() as doorbell:
        doorbell.subscribe(f"{bench.prefix}:bell:")
        assert doorbell.get_message(timeout=10)["type"] == "subscribe"
        assert bench.control("k1") == [Code.DONE, b""]
        assert doorbell.get_message(timeout=10)["data"] == b"e"


def test_an_ended_execution_takes_no_command(bench: Bench) -> None:
    attempt = bench.claim()[1]
    bench.append(attempt, 2, "END", state="ended", outcome="failed")
    assert bench.control() == [Code.ENDED, b"failed"]
    assert bench.kinds() == {"meta": "hash"}
