"""A child's end is as asked only if a signal that it was sent explains it."""

from __future__ import annotations

import signal

import pytest

from capsule_tasks.sessions.process.child_process import ExitStatus

TERM, QUIT, KILL = signal.SIGTERM, signal.SIGQUIT, signal.SIGKILL


@pytest.mark.parametrize(
    ("status", "sent"),
    [(-TERM, {TERM}), (-KILL, {KILL}), (-KILL, {TERM, KILL}), (0, {TERM}), (128 + QUIT, {QUIT})],
)
def test_an_exit_that_was_asked_for(status: int, sent: set[int]) -> None:
    assert ExitStatus(status).was_asked_for(sent)


@pytest.mark.parametrize(
    ("status", "sent"),
    [
        (-KILL, {TERM}),  # the kernel's, for want of memory: the task had survived the other
        (-KILL, set()),
        (-signal.SIGSEGV, {TERM}),
        (-signal.SIGXCPU, {TERM}),
        (-TERM, {QUIT}),
        (1, set()),
        (1, {signal.SIGWINCH}),
    ],
)
def test_an_exit_that_was_not_asked_for(status: int, sent: set[int]) -> None:
    assert not ExitStatus(status).was_asked_for(sent)
