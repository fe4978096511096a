"""`claim`: each attempt has one owner, and records what became of the one before."""

from __future__ import annotations

from typing import Any

import pytest

from capsule_tasks.storage.scripts import Code
from tests.lua.executions.bench import AGE_MS, KEPT_MS, QUIET_MS, Bench


def test_a_claim_makes_a_record_with_its_event_and_no_stream(bench: Bench) -> None:
    reply = bench.claim()
    meta = bench.meta()
    assert reply == [Code.DONE, meta["attempt"].encode(), 1]
    first = f"{meta['attempt']}-1"
    assert meta.pop(first).partition(":")[2] == "BEGUN"
    assert int(meta.pop("claimed")) == pytest.approx(int(meta["attempt"]), abs=1000)
    assert meta == {
        "state": "running",
        "attempt": meta["attempt"],
        "seq": "1",
        "owner": "w1",
        "claim": "c1",
        "ack": "late",
        "worker": "worker",
        "task": "task",
        "group": "g",
        "index": "3",
        "inline": first,
    }
    assert bench.kinds() == {"meta": "hash"}


def test_the_same_claim_again_is_the_same_attempt(bench: Bench) -> None:
    first = bench.claim()
    before = bench.meta()
    assert bench.claim() == first
    assert bench.meta() == before


@pytest.mark.parametrize("loud", [0, 1])
@pytest.mark.parametrize(("state", "outcome"), [("ended", "failed"), ("waiting", "")])
def test_a_claim_may_bring_the_whole_attempt_and_be_repeated(
    bench: Bench, state: str, outcome: str, loud: int
) -> None:
    whole: Any = ("c1", "w1", "-", "A", "END")
    first = bench.claim(*whole, state=state, outcome=outcome, loud=loud)
    assert first == [Code.DONE, bench.meta()["attempt"].encode(), 3]
    before = bench.meta()
    assert (before["state"], before.get("outcome", "")) == (state, outcome)
    assert "owner" not in before
    assert bench.claim(*whole, state=state, outcome=outcome, loud=loud) == first
    assert bench.meta() == before
    assert bench.said() == ["BEGUN", "A", "END"]
    assert bench.kinds() == {"meta": "hash", **({"events": "stream"} if loud else {})}
    most = {"waiting": AGE_MS, "ended": KEPT_MS if loud else QUIET_MS}[state]
    assert most / 2 < bench.client.pttl(bench.keys.meta) <= most


def test_a_claim_that_expects_no_owner_is_refused_if_there_is_one(bench: Bench) -> None:
    attempt = bench.claim("c1", "w1", held_by="-")[1]
    before = bench.meta()
    assert bench.claim("c1", "w1", held_by="-")[:2] == [Code.DONE, attempt]
    assert bench.claim("c2", "w2", held_by="-") == [Code.STALE, attempt, b"c1"]
    assert bench.meta() == before
    bench.append(attempt, 2, "LEFT", state="waiting")
    attempt = bench.claim("c3", "w3", held_by="-")[1]
    assert bench.said() == ["BEGUN", "LEFT", "BEGUN"]
    bench.append(attempt, 2, "END", state="ended", outcome="succeeded")
    assert bench.claim("c4", "w4", held_by="-") == [Code.ENDED, b"succeeded"]


def test_a_claim_that_ends_returns_the_commands(bench: Bench) -> None:
    bench.control("k1", "ONE")
    assert bench.claim("c1", "w1", "-", "END", state="ended", outcome="succeeded")[4:] == [b"ONE"]
    assert bench.client.pttl(bench.keys.control) <= QUIET_MS


def test_another_claim_is_a_later_attempt_and_records_the_loss_of_the_first(bench: Bench) -> None:
    first = int(bench.claim()[1])
    second = bench.claim("c2", "w2")
    assert int(second[1]) > first
    assert second[2] == 2
    assert bench.said() == ["BEGUN", "LOST", "BEGUN"]
    assert bench.meta()["owner"] == "w2"
    assert bench.append(first, 2, "late") == [Code.STALE, second[1], b"c2"]
    assert bench.said() == ["BEGUN", "LOST", "BEGUN"]


def test_an_attempt_is_later_also_where_the_clock_went_back(bench: Bench) -> None:
    bench.claim()
    ahead = 9_000_000_000_000
    bench.client.hset(bench.keys.meta, "attempt", ahead)
    assert int(bench.claim("c2")[1]) == ahead + 1


def test_a_claim_returns_the_commands_that_waited_for_it(bench: Bench) -> None:
    assert bench.control("k1", "ONE") == [Code.DONE, b""]
    assert bench.control("k2", "TWO") == [Code.DONE, b""]
    assert bench.kinds() == {"control": "stream"}
    reply = bench.claim()
    assert reply[4::2] == [b"ONE", b"TWO"]
    assert bench.claim()[4::2] == [b"ONE", b"TWO"]


def test_a_claim_that_names_the_holder_takes_from_no_other(bench: Bench) -> None:
    assert bench.claim("c1", "w1", held_by="w0") == [Code.STALE, b"0", b""]
    assert bench.kinds() == {}
    first = bench.claim("c1", "w1")[1]
    assert bench.claim("c2", "w2", held_by="w0") == [Code.STALE, first, b"c1"]
    assert bench.claim("c2", "w2", held_by="w1")[0] == Code.DONE
    assert bench.said() == ["BEGUN", "LOST", "BEGUN"]


def test_an_ended_execution_is_not_claimed(bench: Bench) -> None:
    attempt = bench.claim()[1]
    bench.append(attempt, 2, "END", state="ended", outcome="succeeded")
    before = bench.meta()
    assert bench.claim("c2", "w2") == [Code.ENDED, b"succeeded"]
    assert bench.meta() == before


def test_nothing_is_written_for_an_unclaimed_execution(bench: Bench) -> None:
    assert bench.append(1, 1, "A") == [Code.MISSING]
    assert bench.reap("w1", 1, "lost") == [Code.MISSING]
    assert bench.read() == [Code.MISSING]
    assert bench.call("executions/record") == [Code.MISSING]
    assert bench.kinds() == {}


def test_a_waiting_execution_is_claimed_by_any_worker(bench: Bench) -> None:
    attempt = bench.claim()[1]
    bench.append(attempt, 2, "RETRY", state="waiting")
    assert bench.meta()["state"] == "waiting"
    assert bench.append(attempt, 3, "LATE") == [Code.ENDED, b""]
    assert bench.claim("c2", "w2")[2] == 1
    assert bench.said() == ["BEGUN", "RETRY", "BEGUN"]


def test_a_claim_returns_the_newest_of_more_commands_than_are_kept(bench: Bench) -> None:
    for number in range(1250):
        bench.control(f"k{number}", str(number))
    commands = bench.claim()[4::2]
    assert commands == [str(number).encode() for number in range(250, 1250)]
