"""The Celery app of a Django project, with one line more than Django's own."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.acceptance.others.django_settings")

from celery import Celery, signals

from capsule_tasks import Capsule

app = Celery("project")
app.config_from_object("django.conf:settings", namespace="CELERY")
Capsule(app)


@signals.worker_ready.connect
def tell_ready(**_: Any) -> None:
    if descriptor := os.environ.get("TEST_READY_FD"):
        os.write(int(descriptor), b"ready\n")


@app.task(name="count_results")
def count_results() -> int:
    from django_celery_results.models import TaskResult

    # Of this task alone: a worker stores the ends of tasks that a dead worker of another test left.
    return int(TaskResult.objects.filter(task_name="count_results").count())


@app.task(name="tick")
def tick(name: str) -> str:
    return name
