"""The loss counter while Redis does not answer."""

from __future__ import annotations

from typing import Any

import pytest

from capsule_tasks.executions.publishing import loss_counter
from capsule_tasks.executions.publishing.loss_counter import LossCounter
from capsule_tasks.protocol.messages import TaskCall


async def test_a_redis_that_does_not_answer_in_time_is_named_as_the_reason(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def be_late(*_: Any) -> None:
        raise TimeoutError

    monkeypatch.setattr(loss_counter, "drive_blocking", be_late)
    call = TaskCall(name="shop.count", task_id="one", body=b"")
    counting = LossCounter(5, "redis://localhost")
    assert await counting.admit(call) == 0
    await counting.close()
    assert {line.rpartition(": ")[2] for line in caplog.messages} == {"TimeoutError"}
