"""A wrong setting of the pool is said before anything starts."""

from __future__ import annotations

import pytest
from celery import Celery

from capsule_tasks.errors import InvalidSetting
from capsule_tasks.settings import TaskChildSettings
from capsule_tasks.taskpool.options import check, profile, setting


def test_a_name_that_nobody_knows_is_told(caplog: pytest.LogCaptureFixture) -> None:
    app = Celery("shop")
    app.conf.update(capsule_ready=5, capsule_revoke_ttl_s=10, capsule_streams=False)
    check(app)
    assert caplog.messages == [
        "there is no setting capsule_ready; did you mean capsule_ready_s?",
    ]


def test_a_value_that_cannot_be_is_refused() -> None:
    app = Celery("shop")
    app.conf.update(capsule_async_children=0)
    with pytest.raises(InvalidSetting, match="capsule_async_children = 0"):
        check(app)


def test_a_loop_that_is_blocked_may_be_sent_all_that_it_may_run() -> None:
    app = Celery("shop")
    for limit in (1, 5000):
        executor = profile(app, TaskChildSettings(async_limit=limit), {}).session.child.executor
        assert executor.max_waiting >= limit


def test_what_nobody_reads_is_not_kept() -> None:
    routing = profile(Celery("shop"), TaskChildSettings(), {}).session.routing
    assert (routing.session_queue, routing.session_queue_bytes) == (1, 1024)
    assert not routing.log_output


def test_the_workers_options_say_when_a_child_is_replaced() -> None:
    options = {"maxtasksperchild": 7, "max_memory_per_child": 100}
    pool = profile(Celery("shop"), TaskChildSettings(), options).pool
    assert (pool.max_uses, pool.max_rss_bytes, pool.fresh) == (7, 102_400, False)
    pool = profile(Celery("shop"), TaskChildSettings(), {"maxtasksperchild": None}).pool
    assert (pool.max_uses, pool.max_rss_bytes) == (None, None)


def test_who_has_celery_spawn_its_children_gets_no_forks() -> None:
    app = Celery("shop", set_as_current=False)
    assert setting(app, "capsule_start") == "fork"
    app.conf.worker_pool_start_method = "spawn"
    assert setting(app, "capsule_start") == "exec"
    app.conf.capsule_start = "fork"
    assert setting(app, "capsule_start") == "fork"
