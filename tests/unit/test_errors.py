"""One root; every branch under it says who has to act."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest

from capsule_tasks import errors
from capsule_tasks.errors import (
    CallerError,
    CapsuleError,
    ExecutionCancelled,
    InternalError,
    OperatorError,
    RetryError,
    StorageError,
    TaskNotCarried,
    TooManyLosses,
)

CLASSES = [value for value in vars(errors).values() if isinstance(value, type)]
CLASSES = [kind for kind in CLASSES if kind.__module__ == errors.__name__]
BRANCHES = (CallerError, RetryError, OperatorError, InternalError)
GROUPS = (StorageError,)
"""Say what happened, across the branches: their classes say who has to act."""
LEAVES = [
    kind
    for kind in CLASSES
    if kind not in (CapsuleError, ExecutionCancelled) and kind not in BRANCHES + GROUPS
]
each_leaf = pytest.mark.parametrize("kind", LEAVES, ids=lambda kind: kind.__name__)


def parts(kind: type[CapsuleError]) -> list[str]:
    """What an error of that class is made from, if it is not just a text."""
    return list(inspect.signature(kind).parameters) if "__init__" in vars(kind) else []


def made(kind: type[CapsuleError]) -> CapsuleError:
    values = [("<running>",) if name == "running" else f"<{name}>" for name in parts(kind)]
    return kind(*values) if values else kind("text")


def test_every_error_comes_from_the_one_root_but_the_one_user_code_sees() -> None:
    strangers = {kind for kind in CLASSES if not issubclass(kind, CapsuleError)}
    assert strangers == {ExecutionCancelled}
    assert len(LEAVES) > 10


def test_the_branches_are_the_only_children_of_the_root() -> None:
    assert {kind for kind in CLASSES if CapsuleError in kind.__bases__} == {
        *BRANCHES,
        *GROUPS,
    }


@each_leaf
def test_each_error_says_who_has_to_act(kind: type[CapsuleError]) -> None:
    assert sum(issubclass(kind, branch) for branch in BRANCHES) == 1


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_each_docstring_is_the_message(kind: type) -> None:
    first, *_ = (kind.__doc__ or "").split("\n")
    assert len(first) > 20
    assert first.endswith(".")


@each_leaf
def test_each_error_tells_its_parts_in_its_text_and_keeps_the_ids_as_attributes(
    kind: type[CapsuleError],
) -> None:
    error = made(kind)
    for name in parts(kind):
        told = f"<{name}>" in str(error)
        assert told or hasattr(error, name), f"{name} is neither in the text nor an attribute"
    assert str(error)


@each_leaf
def test_an_error_survives_a_copy_and_a_trip_to_another_process(kind: type[CapsuleError]) -> None:
    error = made(kind)
    error.add_note("a note")
    for other in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert type(other) is kind
        assert str(other) == str(error)
        assert vars(other) == vars(error)
        assert other.__notes__ == ["a note"]


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("InvalidSetting", ValueError),
        ("FrameTooLarge", ValueError),
        ("SessionStateError", RuntimeError),
        ("UnknownInputRequest", LookupError),
        ("ExecutionTimeout", TimeoutError),
    ],
)
def test_who_does_not_know_this_package_can_catch_the_builtin(name: str, builtin: Any) -> None:
    assert issubclass(getattr(errors, name), builtin)


def test_a_cancelled_execution_is_a_ctrl_c_to_libraries_and_no_error_of_ours() -> None:
    assert issubclass(ExecutionCancelled, KeyboardInterrupt)
    assert not issubclass(ExecutionCancelled, Exception)


@pytest.mark.parametrize(
    "error",
    [TaskNotCarried("t", "1", "it is too large"), TooManyLosses("t", "1", 5, None)],
    ids=lambda error: type(error).__name__,
)
def test_what_ends_a_task_is_made_anew_as_celery_does_it(error: CapsuleError) -> None:
    assert str(type(error)(*error.args)) == str(error)
