"""The work of a Django view, as a program that exits with 0 if all is right."""

from __future__ import annotations

import time

import django

from tests.acceptance.others.django_app import app, count_results, tick

django.setup()

from celery.contrib.django.task import DjangoTask  # noqa: E402 - Django first
from django.core.management import call_command  # noqa: E402
from django.db import transaction  # noqa: E402
from django_celery_beat.models import IntervalSchedule, PeriodicTask  # noqa: E402
from django_celery_results.models import TaskResult  # noqa: E402

from capsule_tasks import Execution  # noqa: E402
from capsule_tasks.client import Task  # noqa: E402


def use() -> None:
    assert isinstance(count_results, DjangoTask)
    assert isinstance(count_results, Task)
    execution = count_results.delay()
    assert isinstance(execution, Execution)
    assert execution.get(timeout=60) == 0
    assert TaskResult.objects.get(task_id=execution.id).status == "SUCCESS"
    with transaction.atomic():
        tick.delay_on_commit("committed")
        assert not TaskResult.objects.filter(task_name="tick").exists()
    until(lambda: TaskResult.objects.filter(task_name="tick", result='"committed"').exists())
    every, _ = IntervalSchedule.objects.get_or_create(every=1, period="seconds")
    PeriodicTask.objects.create(name="t", task="tick", interval=every, args='["by beat"]')
    until(lambda: TaskResult.objects.filter(task_name="tick", result='"by beat"').exists())
    app.close()


def until(condition: object) -> None:
    deadline = time.monotonic() + 60
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.05)


if __name__ == "__main__":
    import sys

    if sys.argv[1:] == ["migrate"]:
        call_command("migrate", verbosity=0)
    else:
        use()
