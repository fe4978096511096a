"""A restart of the pool that fails half-way."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery

from capsule_tasks.settings import TaskChildSettings
from capsule_tasks.taskpool import pool_runtime as staff_module
from capsule_tasks.taskpool.options import profile
from capsule_tasks.taskpool.pool_runtime import Staff


class Spawner:
    async def stop(self) -> None:
        raise OSError("the old template does not end")


def test_what_waits_for_new_code_goes_on_also_if_the_old_template_does_not_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[Any] = []
    staff: Any = object.__new__(Staff)
    staff._renewing, staff._is_closed, staff._spawner = asyncio.Lock(), False, Spawner()
    staff._names = set()
    staff.sessions = SimpleNamespace(renew=lambda *_: told.append("renewed"))
    staff.supervisor = SimpleNamespace(tasks_known=told.append)
    staff.dispatcher = SimpleNamespace(replace_all=told.append)

    async def tried(*_: object) -> Spawner:
        return Spawner()

    monkeypatch.setattr(staff_module, "tried", tried)
    lane = TaskChildSettings(app="shop:app")
    profiles = {"blocking": profile(Celery("shop"), lane, {})}
    asyncio.run(staff._renew(profiles, {"new"}))
    assert told == ["renewed", {"new"}]  # `renew` replaces every child: once is enough
    assert "did not end in order" in caplog.text
    staff.sessions.renew = None
    asyncio.run(staff._renew(profiles, {"newer"}))
    assert told[2:] == [{"newer"}]
    assert "not as a whole" in caplog.text
