"""The app of the tests of log lines: tasks that none of the others has."""

from __future__ import annotations

import os

from tests.acceptance.app import app, hold


@app.task(name="crash_when_terminated")
def crash_when_terminated(key: str, signum: int) -> None:
    try:
        hold(key)
    except SystemExit:
        os.kill(os.getpid(), signum)


__all__ = ["app"]
