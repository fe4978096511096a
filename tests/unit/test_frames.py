"""Stacks without the frames of Celery that called the task."""

from __future__ import annotations

from pathlib import Path

import celery

from capsule_tasks.taskpool.frames import without_celery

OWN = '  File "/srv/celery/tasks.py", line 3, in report'
CELERYS = f'  File "{Path(celery.__file__).parent}/app/trace.py", line 479, in trace_task'
MAIN, OTHER = "thread MainThread (most recent call last):", "thread other (most recent call last):"


def test_a_task_keeps_its_own_frames() -> None:
    assert without_celery(f"{MAIN}\n{CELERYS}\n{OWN}") == f"{MAIN}\n{OWN}"


def test_a_stack_that_has_nothing_else_stays_whole() -> None:
    text = f"{MAIN}\n{CELERYS}\n{OTHER}\n{CELERYS}\n{OWN}"
    assert without_celery(text).splitlines() == [MAIN, CELERYS, OTHER, OWN]
    assert without_celery("") == ""
