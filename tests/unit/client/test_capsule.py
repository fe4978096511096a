"""`Capsule(app)`: which tasks it reaches, and which pools it takes for its own."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery, Task

from capsule_tasks import Capsule, Execution
from capsule_tasks.client.capsule import POOL
from capsule_tasks.taskpool import TaskPool


class Base(Task):  # type: ignore[misc]
    pass


class OwnTask(Base):
    name = "own"

    def run(self) -> None: ...


class OwnPool(TaskPool):
    pass


def app(**conf: Any) -> Celery:
    made = Celery("shop", set_as_current=False)
    made.conf.update(conf)
    return made


def conflicts(pool: Any) -> list[str]:
    shop = app(worker_pool=pool)
    capsule = Capsule(shop)
    found = capsule.conflicts
    assert shop.conf.worker_pool == pool
    return found


def nothing() -> None: ...


def test_tasks_are_mixed_whenever_they_are_made() -> None:
    shop = app()
    early = shop.task(name="early", base=Base, shared=False)(nothing)
    Capsule(shop)
    Capsule(shop)
    between = shop.task(name="between", base=Base, shared=False)(nothing)
    shop.finalize()
    late = shop.task(name="late", base=Base, shared=False)(nothing)
    own = shop.register_task(OwnTask())
    for task in (early, between, late, own):
        assert isinstance(task.AsyncResult("id"), Execution), task.name
        assert isinstance(shop.tasks[task.name], Base)


@pytest.mark.parametrize(
    "pool",
    [POOL, POOL.replace(":", "."), "capsule_tasks.taskpool.pool:TaskPool", TaskPool, OwnPool],
)
def test_the_pool_is_known_in_each_of_its_forms(pool: Any) -> None:
    assert conflicts(pool) == []


def test_conflicts_are_right_at_once_and_stay_so() -> None:
    """The configuration has not been read yet, and more of it may be added."""
    shop = Celery("shop", set_as_current=False)
    shop.config_from_object({"worker_pool": "threads"})
    capsule = Capsule(shop)
    (conflict,) = capsule.conflicts
    assert "'threads'" in conflict
    shop.conf.update(worker_pool=POOL, accept_content=["json", "pickle"])
    (conflict,) = capsule.conflicts
    assert "pickle" in conflict
    fresh = Celery("fresh", set_as_current=False)
    assert Capsule(fresh).conflicts == []
    assert fresh.conf.worker_pool == POOL


@pytest.mark.parametrize("pool", ["prefork", "solo", "capsule_tasks.taskpool:Other", Base])
def test_another_pool_is_reported_as_a_conflict(pool: Any) -> None:
    (conflict,) = conflicts(pool)
    assert "tasks do not run in sessions" in conflict


@pytest.mark.parametrize(
    ("name", "namespace"),
    [("worker_pool", None), ("CELERYD_POOL", None), ("CELERY_WORKER_POOL", "CELERY")],
)
def test_a_pool_that_the_configuration_names_stays(name: str, namespace: str | None) -> None:
    shop = Celery("shop", set_as_current=False)
    shop.config_from_object({name: "threads"}, namespace=namespace)
    capsule = Capsule(shop)
    assert shop.conf.worker_pool == "threads"
    assert "'threads'" in capsule.conflicts[0]
    other = Celery("other", set_as_current=False)
    other.config_from_object({"task_ignore_result": True})
    Capsule(other)
    assert (other.conf.worker_pool, other.conf.task_ignore_result) == (POOL, True)
