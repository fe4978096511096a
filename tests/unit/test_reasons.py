"""A log line that ends in an error says something of it, also if the error says nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import capsule_tasks
from capsule_tasks import errors
from capsule_tasks.errors import reason_of
from capsule_tasks.executions.publishing import loss_counter
from capsule_tasks.executions.publishing.loss_counter import LossCounter
from capsule_tasks.protocol.messages import TaskCall
from capsule_tasks.storage.connections.pipelined import PipelinedConnection
from capsule_tasks.storage.executions.store import ExecutionStore

PACKAGE = Path(capsule_tasks.__file__).parent
_OWN = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.CapsuleError)
}
"""Errors that always say something."""


def test_an_error_that_says_nothing_has_its_type() -> None:
    assert reason_of(TimeoutError()) == "TimeoutError"
    assert reason_of(ValueError("x")) == "x"


@pytest.mark.parametrize("kind", _OWN.values())
def test_an_error_of_ours_always_says_something(kind: type[errors.CapsuleError]) -> None:
    try:
        error = kind("")
    except TypeError:
        return  # it has a sentence of its own, made from more parts
    assert str(error).strip()
    assert not str(error).startswith(" ")


def test_an_error_of_ours_keeps_what_it_is_told() -> None:
    assert str(errors.SessionLost("the child is gone")) == "the child is gone"
    assert str(errors.SessionLost()) == "SessionLost"
    assert str(errors.StorageFull("")) == "StorageFull (nothing was written)"


async def test_closed_connections_say_that_they_are_closed() -> None:
    closing = PipelinedConnection("redis://localhost")
    await closing.close()
    with pytest.raises(errors.StorageClosed, match="are closed; make new ones"):
        await ExecutionStore(closing).read_record("one")


async def test_a_redis_that_does_not_answer_in_time_is_named_as_the_reason(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def be_late(*_: Any) -> None:
        raise TimeoutError

    monkeypatch.setattr(loss_counter, "drive_blocking", be_late)
    call = TaskCall(name="shop.count", task_id="one", body=b"")
    counting = LossCounter(5, "redis://localhost")
    assert await counting.admit(call) == 0
    await counting.close()
    assert {line.rpartition(": ")[2] for line in caplog.messages} == {"TimeoutError"}


def _in_log_calls(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Names of caught errors that are logged as they are, if they may say nothing."""
    for handler in ast.walk(tree):
        if not isinstance(handler, ast.ExceptHandler) or handler.name is None:
            continue
        kinds = {
            node.id for node in ast.walk(handler.type or handler) if isinstance(node, ast.Name)
        }
        if kinds <= _OWN.keys():
            continue
        for call in ast.walk(handler):
            if (
                isinstance(call, ast.Call)
                and isinstance(call.func, ast.Attribute)
                and (ast.unparse(call.func.value) == "log" or call.func.attr == "warn_seldom")
            ):
                for argument in call.args[1:]:
                    if isinstance(argument, ast.Name) and argument.id == handler.name:
                        yield call.lineno, ast.unparse(call)


def test_no_line_of_the_package_ends_in_an_empty_reason() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {call}: log reason_of({call})"
        for path in PACKAGE.rglob("*.py")
        for line, call in _in_log_calls(ast.parse(path.read_text()))
    ]
    assert not found
