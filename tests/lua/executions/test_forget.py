"""`forget` and `forget_unfinished`: all of an execution is erased, or all but its end."""

from __future__ import annotations

from typing import Any

import pytest

from capsule_tasks.storage.scripts import Code
from tests.lua.executions.bench import Bench

TTL_MS = 60_000


def forget_unfinished(bench: Bench) -> list[Any]:
    ends = ("cancelled", "NEVER RAN", "lost", "MAY HAVE RUN")
    return bench.call("executions/forget_unfinished", TTL_MS, bench.keys.channel, *ends)


@pytest.mark.parametrize("loud", [0, 1])
def test_nothing_is_left_of_a_running_execution_but_its_end(bench: Bench, loud: int) -> None:
    attempt = bench.claim()[1]
    bench.append(attempt, 2, "SECRET", loud=loud)
    for _ in range(2):
        assert forget_unfinished(bench) == [Code.DONE, b"lost"]
        assert bench.said() == ["MAY HAVE RUN"]
    meta = bench.meta()
    assert (meta["state"], meta["outcome"], meta["seq"]) == ("ended", "lost", "1")
    assert int(meta["attempt"]) > int(attempt)
    assert 0 < bench.client.pttl(bench.keys.meta) <= TTL_MS
    assert not bench.client.exists(bench.keys.events, bench.keys.control)
    assert bench.append(attempt, 3, "LATE")[0] == Code.STALE
    assert bench.claim("c2", "w2") == [Code.ENDED, b"lost"]


def test_an_execution_that_nobody_claimed_never_runs(bench: Bench) -> None:
    assert forget_unfinished(bench) == [Code.DONE, b"cancelled"]
    assert bench.said() == ["NEVER RAN"]
    assert bench.claim() == [Code.ENDED, b"cancelled"]


def test_an_execution_that_has_ended_is_left_as_it_is(bench: Bench) -> None:
    bench.claim("c1", "w1", "", "END", state="ended", outcome="succeeded")
    before = bench.meta()
    assert forget_unfinished(bench) == [Code.ENDED, b"succeeded"]
    assert bench.meta() == before
    assert bench.call("executions/forget", bench.keys.channel) == [Code.DONE]
    assert bench.meta() == {}
