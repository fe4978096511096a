"""What a child that is no fork is told of its worker's configuration."""

from __future__ import annotations

from datetime import timedelta

import pytest
from celery import Celery

from capsule_tasks.settings import TaskChildSettings
from capsule_tasks.taskpool.app_settings import lane_settings


@pytest.fixture
def told() -> TaskChildSettings:
    app = Celery("shop", set_as_current=False)
    app.config_from_object({"task_ignore_result": True})
    app.add_defaults({"added": 1, "both": "as a default"})
    app.conf.update(
        both="assigned", expires=timedelta(1), queues=("a", "b"), owner=object(), colours={"red"}
    )
    assert app.conf.task_ignore_result  # the configuration is read with the first question
    return lane_settings(app, "worker@host")


def test_what_was_assigned_or_added_is_told(told: TaskChildSettings) -> None:
    assert told.conf == {"added": 1, "both": "assigned", "queues": ("a", "b")}


def test_what_would_arrive_as_something_else_is_named_only(told: TaskChildSettings) -> None:
    assert told.unsendable == ("colours", "expires", "owner")
