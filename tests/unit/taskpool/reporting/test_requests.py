"""How old an end in the result backend is."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from capsule_tasks.taskpool.reporting.requests import PoolRequest

BEGUN = 1_700_000_000.0
EAST = timezone(timedelta(hours=9))


@pytest.mark.parametrize("made", [str, lambda done: done], ids=["text", "object"])
@pytest.mark.parametrize("is_older", [True, False])
def test_a_date_without_a_zone_is_of_utc_wherever_the_worker_is(
    monkeypatch: pytest.MonkeyPatch, made: Any, is_older: bool
) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        request: Any = PoolRequest()
        request.time_start = BEGUN
        done = datetime.fromtimestamp(BEGUN + (-60 if is_older else 60), UTC)
        for date in (done, done.astimezone(EAST), done.replace(tzinfo=None)):
            assert request._is_older(made(date)) is is_older
    finally:
        monkeypatch.undo()
        time.tzset()
