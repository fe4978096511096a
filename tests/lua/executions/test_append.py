"""`append`: events are written once, in order, within the limits of a stream."""

from __future__ import annotations

from typing import Any

import pytest

from capsule_tasks.storage.scripts import Code
from tests.lua.executions.bench import KEPT_MS, QUIET_MS, Bench


def test_quiet_events_need_no_stream_and_vanish_soon_after_the_end(bench: Bench) -> None:
    attempt = bench.claim()[1]
    assert bench.append(attempt, 2, "ACC") == [Code.DONE, 2]
    assert bench.append(attempt, 3, "END", state="ended", outcome="failed") == [Code.DONE, 3]
    assert bench.kinds() == {"meta": "hash"}
    assert bench.said() == ["BEGUN", "ACC", "END"]
    assert bench.client.pttl(bench.keys.meta) <= QUIET_MS
    meta = bench.meta()
    assert (meta["state"], meta["outcome"]) == ("ended", "failed")
    assert "owner" not in meta


def test_the_first_loud_event_moves_all_to_a_stream_in_order(bench: Bench) -> None:
    attempt = bench.claim()[1].decode()
    bench.append(attempt, 2, "ACC")
    bench.append(attempt, 3, "OUT", loud=1)
    bench.append(attempt, 4, "MORE")
    assert bench.kinds() == {"meta": "hash", "events": "stream"}
    entries = bench.client.xrange(bench.keys.events)
    assert [(i.decode(), f[b"d"]) for i, f in entries] == [
        (f"{attempt}-1", b"BEGUN"),
        (f"{attempt}-2", b"ACC"),
        (f"{attempt}-3", b"OUT"),
        (f"{attempt}-4", b"MORE"),
    ]
    assert "inline" not in bench.meta()
    assert bench.said(f"{attempt}-2") == ["OUT", "MORE"]
    assert bench.said(count=1) == ["BEGUN"]


def test_many_quiet_attempts_become_a_stream(bench: Bench) -> None:
    for number in range(8):
        attempt = bench.claim(f"c{number}")[1]
        bench.append(attempt, 2, f"RETRY{number}", state="waiting")
    assert bench.said() == [x for n in range(8) for x in ("BEGUN", f"RETRY{n}")]
    assert bench.kinds() == {"meta": "hash", "events": "stream"}
    attempt = bench.claim("last")[1]
    bench.append(attempt, 2, "END", state="ended", outcome="failed")
    assert bench.said()[-1] == "END"
    assert bench.client.pttl(bench.keys.meta) <= QUIET_MS
    assert bench.client.pttl(bench.keys.events) <= QUIET_MS


def test_output_after_many_silent_attempts_is_kept(bench: Bench) -> None:
    for number in range(8):
        attempt = bench.claim(f"c{number}")[1]
        bench.append(attempt, 2, f"RETRY{number}", state="waiting")
    attempt = bench.claim("last")[1]
    bench.append(attempt, 2, "OUT", loud=1)
    bench.append(attempt, 3, "END", state="ended", outcome="failed")
    assert bench.said()[-3:] == ["BEGUN", "OUT", "END"]
    for key in (bench.keys.meta, bench.keys.events):
        assert QUIET_MS < bench.client.pttl(key) <= KEPT_MS


@pytest.mark.parametrize("loud", [0, 1])
def test_a_repeat_adds_only_what_is_missing(bench: Bench, loud: int) -> None:
    attempt = bench.claim()[1]
    assert bench.append(attempt, 2, "A", "B", loud=loud) == [Code.DONE, 3]
    assert bench.append(attempt, 2, "A", "B", loud=loud) == [Code.DONE, 3]
    assert bench.append(attempt, 3, "B", "C", loud=loud) == [Code.DONE, 4]
    assert bench.said() == ["BEGUN", "A", "B", "C"]


@pytest.mark.parametrize("loud", [0, 1])
def test_the_end_can_be_repeated_and_nothing_follows_it(bench: Bench, loud: int) -> None:
    attempt = bench.claim()[1]
    end = (attempt, 2, "A", "END")
    options: Any = {"state": "ended", "outcome": "succeeded", "loud": loud}
    assert bench.append(*end, **options) == [Code.DONE, 3]
    assert bench.append(*end, **options) == [Code.DONE, 3]
    assert bench.append(attempt, 4, "MORE") == [Code.ENDED, b"succeeded"]
    assert bench.said() == ["BEGUN", "A", "END"]
    ttl = bench.client.pttl(bench.keys.meta)
    assert (QUIET_MS < ttl <= KEPT_MS) if loud else ttl <= QUIET_MS


def test_a_hole_is_refused(bench: Bench) -> None:
    attempt = bench.claim()[1]
    assert bench.append(attempt, 3, "B") == [Code.CONFLICT, 1]
    assert bench.said() == ["BEGUN"]


def test_nothing_is_written_for_an_unclaimed_execution(bench: Bench) -> None:
    assert bench.append(1, 1, "A") == [Code.MISSING]
    assert bench.reap("w1", 1, "lost") == [Code.MISSING]
    assert bench.read() == [Code.MISSING]
    assert bench.call("executions/record") == [Code.MISSING]
    assert bench.kinds() == {}


def test_the_oldest_events_are_trimmed_by_size_and_leave_a_gap(bench: Bench) -> None:
    attempt = bench.claim()[1].decode()
    for seq in range(2, 102):
        bench.append(attempt, seq, f"{seq:050d}", loud=1, live=1000)
        size = sum(len(fields[b"d"]) for _, fields in bench.client.xrange(bench.keys.events))
        assert size <= 1000 + 100
    left = bench.ids()
    assert bench.meta()["first_kept_id"] == left[0]
    assert left[-1] == f"{attempt}-101"
    assert 15 <= len(left) <= 22
    bench.append(attempt, 102, "END", state="ended", outcome="succeeded", kept=400)
    size = sum(len(fields[b"d"]) for _, fields in bench.client.xrange(bench.keys.events))
    assert 200 <= size <= 400 + 100
    assert bench.said()[-1] == "END"
    marks = [name for name in bench.meta() if name.startswith("trim")]
    assert len(marks) <= 6


def test_an_end_trims_a_long_stream_in_one_call(bench: Bench) -> None:
    attempt = bench.claim()[1].decode()
    whole = [f"{n:0100d}" for n in range(2000)]
    for first in range(0, len(whole), 100):
        bench.append(attempt, first + 2, *whole[first : first + 100], loud=1, live=250_000)
    assert "first_kept_id" not in bench.meta()
    end: Any = {"state": "ended", "outcome": "succeeded", "live": 250_000, "kept": 400}
    bench.append(attempt, len(whole) + 2, "END", **end)
    assert bench.said() == [*whole[-3:], "END"]
    meta = bench.meta()
    assert meta["first_kept_id"] == bench.ids()[0] == f"{attempt}-1999"
    marks = {name for name in meta if name.startswith("trim")}
    assert marks == {f"trim{n}" for n in range(int(meta["low"]), int(meta["high"]) + 1)}


def test_an_event_larger_than_what_is_kept_is_not_kept(bench: Bench) -> None:
    attempt = bench.claim()[1].decode()
    bench.append(attempt, 2, "A" * 300, "B" * 300, "C" * 5000, loud=1, live=10_000)
    bench.append(attempt, 5, "END", state="ended", outcome="succeeded", kept=400)
    assert bench.said() == ["END"]
