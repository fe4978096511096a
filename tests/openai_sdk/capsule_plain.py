"""A pytest plugin for the SDK's own tests: what they need here, a time limit, and a report.

The plugins of this folder are imported in the SDK's checkout, whose `tests` hides ours: they import
nothing of ours but the package, and each other.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

TEST_LIMIT_S = 60

# The tests make errors of `openai` with httpx, of whose successor `openai` needs the same names.
sys.modules.setdefault("httpx", httpx2)

_bad: dict[str, str] = {}
"""The tests that did not pass, with the last line of their errors."""
_passed: list[str] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Fail a test that hangs, so that the others run."""

    def fail(*_: Any) -> None:
        raise TimeoutError(f"the test took longer than {TEST_LIMIT_S} s")

    signal.signal(signal.SIGALRM, fail)
    signal.alarm(TEST_LIMIT_S)
    try:
        return (yield)
    finally:
        signal.alarm(0)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _bad[report.nodeid] = str(report.longrepr).strip().splitlines()[-1]
    elif report.passed and report.when == "call":
        _passed.append(report.nodeid)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _bad[report.nodeid] = str(report.longrepr).strip().splitlines()[-1]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        outcomes = {"bad": _bad, "passed": _passed}
        Path(os.environ["CAPSULE_SDK_REPORT"]).write_text(json.dumps(outcomes))
