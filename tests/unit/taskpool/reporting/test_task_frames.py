"""Stacks without the frames that called the task, and without threads that are not its own."""

from __future__ import annotations

import threading
from pathlib import Path

import celery
import click

import capsule_tasks
from capsule_tasks.taskpool.reporting.task_frames import only_task_frames


def frame(file: object, function: str) -> str:
    return f'  File "{file}", line 3, in {function}'


def inside(package: object, file: str) -> Path:
    return Path(str(vars(package)["__file__"])).parent / file


OWN = frame("/srv/celery/tasks.py", "report")
CELERYS = frame(inside(celery, "app/trace.py"), "trace_task")
THREADING = frame(threading.__file__, "Thread.run")
LAUNCH = [
    frame("/srv/.venv/bin/celery", "<module>"),
    CELERYS,
    frame(inside(click, "core.py"), "Command.main"),
    frame(inside(capsule_tasks, "taskpool/pool.py"), "TaskPool.on_start"),
    frame(inside(capsule_tasks, "sessions/process/template.py"), "_be_template"),
]
MAIN = "thread MainThread of execution x (most recent call last):"
OTHER = "thread other (most recent call last):"


def only(*lines: str) -> list[str]:
    return only_task_frames("\n".join(lines)).splitlines()


def test_a_task_keeps_its_own_frames_and_what_they_call() -> None:
    inner = [OWN, CELERYS, THREADING]
    assert only(MAIN, *LAUNCH, CELERYS, *inner) == [MAIN, *inner]


def test_a_task_in_a_child_that_was_not_forked_keeps_its_own_frames() -> None:
    assert only(MAIN, frame("<frozen runpy>", "_run_code"), CELERYS, OWN) == [MAIN, OWN]


def test_a_thread_without_a_frame_of_the_task_is_left_out() -> None:
    assert only(OTHER, THREADING, MAIN, *LAUNCH, CELERYS, OWN) == [MAIN, OWN]
    assert only(OTHER, THREADING, OWN, MAIN, *LAUNCH, OWN) == [OTHER, OWN, MAIN, OWN]


def test_packages_may_be_installed_inside_the_standard_library() -> None:
    library = frame(Path(threading.__file__).parent / "site-packages/some/lib.py", "work")
    assert only(OTHER, THREADING, library) == [OTHER, library]


def test_the_stack_of_a_built_in_task_stays_whole() -> None:
    assert only(MAIN, CELERYS, OTHER, THREADING, OWN) == [MAIN, CELERYS, OTHER, OWN]
    assert only(OTHER, CELERYS) == [OTHER, CELERYS]
    assert only() == []


def test_stacks_that_faulthandler_wrote_are_the_other_way_round() -> None:
    header = "Current thread 0x00007f (most recent call first):"
    assert only(header, CELERYS, OWN, CELERYS, *reversed(LAUNCH)) == [header, CELERYS, OWN]
