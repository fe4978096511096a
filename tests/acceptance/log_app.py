"""The app of the tests of log lines: tasks that none of the others has."""

from __future__ import annotations

import os
import signal

from tests.acceptance.app import app, hold


@app.task(name="crash_when_told")
def crash_when_told(key: str) -> None:
    try:
        hold(key)
    except SystemExit:
        os.kill(os.getpid(), signal.SIGSEGV)


__all__ = ["app"]
