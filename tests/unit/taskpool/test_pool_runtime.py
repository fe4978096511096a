"""A restart of the pool that fails half-way."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery

from capsule_tasks.settings import TaskChildSettings
from capsule_tasks.taskpool.options import profile
from capsule_tasks.taskpool.pool_runtime import PoolRuntime


class Spawner:
    async def stop(self) -> None:
        raise OSError("the old template does not end")


def test_a_reload_goes_on_even_if_the_old_template_does_not_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls: list[Any] = []
    runtime: Any = object.__new__(PoolRuntime)
    runtime._reloading, runtime._is_closed, runtime._spawner = asyncio.Lock(), False, Spawner()
    runtime._names = set()
    runtime.sessions = SimpleNamespace(renew=lambda *_: calls.append("renewed"))
    runtime.supervisor = SimpleNamespace(tasks_known=calls.append)
    runtime.dispatcher = SimpleNamespace(replace_all=calls.append)

    async def start_trial_child(*_: object) -> Spawner:
        return Spawner()

    runtime._start_trial_child = start_trial_child
    lane = TaskChildSettings(app="shop:app")
    profiles = {"blocking": profile(Celery("shop"), lane, {})}
    asyncio.run(runtime._reload(profiles, {"new"}))
    assert calls == ["renewed", {"new"}]  # `renew` replaces every child: once is enough
    assert "old template did not stop cleanly" in caplog.text
    runtime.sessions.renew = None
    asyncio.run(runtime._reload(profiles, {"newer"}))
    assert calls[2:] == [{"newer"}]
    assert "or only in part" in caplog.text
