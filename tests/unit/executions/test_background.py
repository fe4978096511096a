"""Calls that wait for Redis: which errors are repeated, and for how long."""

from __future__ import annotations

import logging

import pytest

from capsule_tasks.errors import (
    StorageDenied,
    StorageError,
    StorageFull,
    StorageUnavailable,
    StorageUnusable,
)
from capsule_tasks.executions import background
from capsule_tasks.executions.background import BackgroundTasks


class Asked:
    """Raises one error after the other, and then answers."""

    def __init__(self, *errors: StorageError) -> None:
        self.errors = list(errors)

    async def __call__(self) -> str:
        if self.errors:
            raise self.errors.pop(0)
        return "answer"


@pytest.fixture(autouse=True)
def _no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "RETRY_DELAY_S", 0.0)


@pytest.mark.parametrize("kind", [StorageFull, StorageDenied, StorageUnusable])
async def test_what_only_an_operator_can_mend_is_raised_at_once(kind: type[StorageError]) -> None:
    asked = Asked(StorageUnavailable("away"), kind("refused"), kind("refused"))
    with pytest.raises(kind):
        await BackgroundTasks().call_unless_refused(asked, "a save")
    assert len(asked.errors) == 1


async def test_within_the_patience_what_is_refused_is_repeated(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = Asked(StorageFull("full"), StorageFull("full"))
    with caplog.at_level(logging.WARNING):
        assert await BackgroundTasks().call_unless_refused(asked, "a save", 1000.0) == "answer"
    assert [record.getMessage() for record in caplog.records] == [
        "a save waits for Redis: full (nothing was written)"
    ]


async def test_a_refusal_is_not_logged_as_an_outage(caplog: pytest.LogCaptureFixture) -> None:
    asked = Asked(StorageFull("full"), StorageUnavailable("away"))
    with caplog.at_level(logging.WARNING):
        assert await BackgroundTasks().call_until_answered(asked) == "answer"
    refused, away = (record.getMessage() for record in caplog.records)
    assert refused.startswith("Redis refuses calls of this worker, which are repeated: full")
    assert away.startswith("Redis is unavailable; buffering task events: away")
