"""A wrong setting of the pool is reported before anything starts."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from celery import Celery

from capsule_tasks.client.configuration import setting
from capsule_tasks.errors import InvalidSetting
from capsule_tasks.settings import TaskChildSettings
from capsule_tasks.taskpool.options import check, lane_settings, profile


def test_an_unknown_setting_is_logged_with_the_nearest_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = Celery("shop")
    app.conf.update(capsule_ready=5, capsule_revoke_ttl_s=10, capsule_streams=False)
    check(app)
    assert caplog.messages == [
        "there is no setting capsule_ready; did you mean capsule_ready_s?",
    ]


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("capsule_async_children", 0, "a whole number"),
        ("capsule_ready_s", "soon", "a number"),
        ("capsule_async_limit", 1.5, "a whole number"),
    ],
)
def test_a_value_that_cannot_be_is_refused(name: str, value: Any, wanted: str) -> None:
    app = Celery("shop")
    app.conf.update({name: value})
    with pytest.raises(InvalidSetting, match=f"{name} = {value!r}: must be {wanted}"):
        check(app)


@pytest.mark.parametrize(
    ("conf", "message"),
    [
        ({"capsule_lease_s": 0}, "capsule_lease_s = 0: must be a number of seconds from 0.05 to"),
        ({"capsule_output": "drop"}, "capsule_output = 'drop': must be one of 'block', 'drop_old"),
        ({"capsule_prefix": 5}, "capsule_prefix = 5: must be of type str"),
        ({"capsule_streams": "no"}, "capsule_streams = 'no': must be of type bool"),
        ({"capsule_retention": "long"}, "capsule_retention = 'long': must be a dict of str to"),
        (
            {"capsule_retention": {"retention_s": "long"}},
            "capsule_retention['retention_s'] = 'long': must be a number of seconds from 1 to",
        ),
        (
            {"capsule_retention": {"live_bytes": 1}},
            "capsule_retention['live_bytes'] = 1: must be at least ExecutionSettings.retention_b",
        ),
        (
            {"capsule_checkpoints": "s4://b"},
            "capsule_checkpoints = 's4://b': must be 'redis', or a",
        ),
        ({"capsule_checkpoints": 5}, "capsule_checkpoints = 5: must be of type str"),
        ({"capsule_retention": {"colour": 1}}, "capsule_retention['colour'] = 1: must be one of"),
    ],
    ids=str,
)
def test_an_error_names_the_setting_as_the_app_does(conf: dict[str, Any], message: str) -> None:
    app = Celery("shop", set_as_current=False)
    app.conf.update(conf)
    with pytest.raises(InvalidSetting) as caught:
        check(app)
    assert str(caught.value).startswith(message)


def test_a_loop_that_is_blocked_may_be_sent_all_that_it_may_run() -> None:
    app = Celery("shop")
    for limit in (1, 5000):
        executor = profile(app, TaskChildSettings(async_limit=limit), {}).session.child.executor
        assert executor.max_waiting >= limit


def test_messages_that_are_not_read_are_not_kept() -> None:
    routing = profile(Celery("shop"), TaskChildSettings(), {}).session.routing
    assert (routing.session_queue, routing.session_queue_bytes) == (1, 1024)
    assert not routing.log_output


def test_options_of_the_worker_set_when_a_child_is_replaced() -> None:
    options = {"maxtasksperchild": 7, "max_memory_per_child": 100}
    pool = profile(Celery("shop"), TaskChildSettings(), options).pool
    assert (pool.max_uses, pool.max_rss_bytes, pool.fresh) == (7, 102_400, False)
    pool = profile(Celery("shop"), TaskChildSettings(), {"maxtasksperchild": None}).pool
    assert (pool.max_uses, pool.max_rss_bytes) == (None, None)


def test_an_app_that_spawns_its_children_gets_no_forks() -> None:
    app = Celery("shop", set_as_current=False)
    assert setting(app, "capsule_start") == "fork"
    app.conf.worker_pool_start_method = "spawn"
    assert setting(app, "capsule_start") == "exec"
    app.conf.capsule_start = "fork"
    assert setting(app, "capsule_start") == "fork"


@pytest.mark.parametrize("revoke_ttl_s", [0, "a day", True])
def test_a_time_that_cannot_be_kept_is_refused_when_the_worker_starts(revoke_ttl_s: Any) -> None:
    app = Celery("wrong", set_as_current=False)
    app.conf.capsule_revoke_ttl_s = revoke_ttl_s
    with pytest.raises(InvalidSetting, match="capsule_revoke_ttl_s"):
        check(app)


@pytest.fixture
def lane() -> TaskChildSettings:
    app = Celery("shop", set_as_current=False)
    app.config_from_object({"task_ignore_result": True})
    app.add_defaults({"added": 1, "both": "as a default"})
    app.conf.update(
        both="assigned", expires=timedelta(1), queues=("a", "b"), owner=object(), colours={"red"}
    )
    assert app.conf.task_ignore_result  # the configuration is read with the first question
    return lane_settings(app, "worker@host")


def test_values_that_were_assigned_or_added_reach_the_child(lane: TaskChildSettings) -> None:
    assert lane.conf == {"added": 1, "both": "assigned", "queues": ("a", "b")}


def test_values_that_cannot_be_sent_unchanged_are_only_named(lane: TaskChildSettings) -> None:
    assert lane.unsendable == ("colours", "expires", "owner")
