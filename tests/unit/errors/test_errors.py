"""One root; the branch of an error says which role has to act."""

from __future__ import annotations

import copy
import importlib
import pickle
import pkgutil
from typing import Any
from uuid import uuid4

import msgspec
import pytest
from celery import Celery

from capsule_tasks import errors
from capsule_tasks.child.executors.failures import describe
from capsule_tasks.errors import (
    AlreadyDecided,
    CallerError,
    CapsuleError,
    ExecutionCancelled,
    ExecutionUnknown,
    InternalError,
    LeaseTaken,
    MayNotDecide,
    OperatorError,
    RetryError,
    RunClaimed,
    RunStopped,
    StorageError,
    UnknownCall,
)
from capsule_tasks.protocol.messages import Failure
from capsule_tasks.protocol.values import revive
from capsule_tasks.taskpool.reporting.exception_info import rebuild

MODULES = [
    importlib.import_module(module.name)
    for module in pkgutil.iter_modules(errors.__path__, f"{errors.__name__}.")
]
CLASSES = [
    value
    for module in MODULES
    for name, value in vars(module).items()
    if isinstance(value, type) and issubclass(value, BaseException)
    if value.__module__ == module.__name__
]
BRANCHES = (CallerError, RetryError, OperatorError, InternalError)
GROUPS = (StorageError, RunStopped)
"""Classes that say what happened, in every branch; the branch says which role has to act."""
LEAVES = [
    kind
    for kind in CLASSES
    if kind not in (CapsuleError, ExecutionCancelled) and kind not in BRANCHES + GROUPS
]
each_leaf = pytest.mark.parametrize("kind", LEAVES, ids=lambda kind: kind.__name__)


def parts(kind: type[CapsuleError]) -> list[str]:
    """The fields that an error of this class is made from, if it is not only a text."""
    return list(kind._fields)


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


def test_every_error_is_found_in_the_package() -> None:
    assert [getattr(errors, kind.__name__) for kind in CLASSES] == CLASSES


@each_leaf
def test_each_error_says_which_role_has_to_act(kind: type[CapsuleError]) -> None:
    assert sum(issubclass(kind, branch) for branch in BRANCHES) == 1


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_each_docstring_is_the_message(kind: type) -> None:
    first, *_ = (kind.__doc__ or "").split("\n")
    assert len(first) > 20
    assert first.endswith(".")


@each_leaf
def test_each_error_names_its_parts_in_its_text_and_keeps_the_ids_as_attributes(
    kind: type[CapsuleError],
) -> None:
    error = made(kind)
    for name in parts(kind):
        is_in_text = f"<{name}>" in str(error)
        assert is_in_text or hasattr(error, name), f"{name} is neither in the text nor an attribute"
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
def test_errors_can_be_caught_as_the_builtin(name: str, builtin: Any) -> None:
    assert issubclass(getattr(errors, name), builtin)


def test_a_cancelled_execution_is_a_ctrl_c_to_libraries_and_no_error_of_ours() -> None:
    assert issubclass(ExecutionCancelled, KeyboardInterrupt)
    assert not issubclass(ExecutionCancelled, Exception)


def test_an_error_is_made_of_its_fields_in_order_or_by_name() -> None:
    held = RunClaimed("r1", owner="w1")
    assert (str(held), held.run_id, held.owner) == ("run 'r1' is claimed by 'w1'", "r1", "w1")
    assert "call 'c' waits for no decision: none" in str(UnknownCall("c", "none"))
    assert "call 'c' was lost: none" in str(UnknownCall("c", "none", "was lost"))
    assert str(LeaseTaken("w1")).startswith("the lease of 'w1' is held by another worker")


def test_a_message_shows_a_list_with_commas_and_a_long_value_shortened() -> None:
    assert str(MayNotDecide("c", ("ann", "bob"), ())) == (
        "ann, bob may not decide on call 'c'; allowed: nobody"
    )
    assert str(MayNotDecide("c", (), ("eve",))) == (
        "an unnamed person may not decide on call 'c'; allowed: eve"
    )
    assert str(ExecutionUnknown("x" * 500)) == f"unknown execution '{'x' * 99}…"


def test_an_error_that_does_not_exist_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="NoSuchError"):
        _ = errors.NoSuchError  # type: ignore[attr-defined]


@pytest.mark.parametrize("serializer", ["json", "pickle"])
@each_leaf
def test_an_error_survives_a_result_backend(kind: type[CapsuleError], serializer: str) -> None:
    app = Celery("app", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(result_serializer=serializer, accept_content=[serializer])
    error = made(kind)
    task_id = uuid4().hex
    app.backend.store_result(task_id, error, "FAILURE")
    other = app.backend.get_task_meta(task_id, cache=False)["result"]
    assert_same(other, error)


@each_leaf
def test_an_error_survives_the_way_from_a_child_to_its_worker(kind: type[CapsuleError]) -> None:
    error = made(kind)
    sent = msgspec.msgpack.encode(describe(error))
    failure = msgspec.msgpack.decode(sent, type=Failure, ext_hook=revive)
    assert_same(rebuild(failure), error)


def test_a_field_that_json_cannot_write_comes_back_as_its_repr() -> None:
    app = Celery("app", broker="memory://", backend="cache+memory://", set_as_current=False)
    task_id = uuid4().hex
    app.backend.store_result(task_id, AlreadyDecided("c", {"a": object}), "FAILURE")
    other = app.backend.get_task_meta(task_id, cache=False)["result"]
    assert (type(other), other.call_id) == (AlreadyDecided, "c")
    assert str(other) == "call 'c' already has a decision: {'a': <class 'object'>}"


def assert_same(other: CapsuleError, error: CapsuleError) -> None:
    assert type(other) is type(error)
    assert str(other) == str(error)
    for name in parts(type(error)):
        assert getattr(other, name) == getattr(error, name)


def test_an_error_is_refused_a_field_too_few_and_one_too_many() -> None:
    with pytest.raises(TypeError, match="RunClaimed needs owner"):
        RunClaimed("r1")  # type: ignore[call-arg]
    for make in (lambda: RunClaimed("r1", "w", "x"), lambda: RunClaimed("r1", "w", extra=1)):  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="RunClaimed has no fields but run_id, owner"):
            make()
