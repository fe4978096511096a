"""An executor that leaves out what it must define says so, instead of ending its child."""

from __future__ import annotations

from typing import Any

import pytest

from capsule_tasks.child.executors.executor import Executor


@pytest.fixture
def incomplete() -> Executor:
    nothing: Any = None
    return Executor(nothing, nothing, nothing, nothing, nothing)


def test_an_executor_must_define_how_it_runs(incomplete: Executor) -> None:
    with pytest.raises(NotImplementedError):
        incomplete.run()


def test_an_executor_must_define_how_it_serves(incomplete: Executor) -> None:
    with pytest.raises(NotImplementedError):
        incomplete._serve()
