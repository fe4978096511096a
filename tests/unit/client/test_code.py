"""`capsule.execute`: what it refuses, and what it sends."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from celery import Celery, chain

from capsule_tasks import Capsule, Execution
from capsule_tasks.client.code import CODE_TASK, arguments_of
from capsule_tasks.errors import CodeFailed, CodeNotRun


@pytest.fixture
def app() -> Celery:
    return Celery("shop", set_as_current=False, broker="memory://", backend="cache+memory://")


@pytest.fixture
def capsule(app: Celery) -> Capsule:
    return Capsule(app)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"source": 6}, "source must be of type str, not 6"),
        ({"source": b"6"}, "source must be of type str, not b'6'"),
        ({"source": None}, "source must be of type str, not None"),
        ({"source": "6", "profile": 7}, "profile must be of type str, not 7"),
        ({"source": "6", "timeout_s": "1"}, "timeout_s = '1': must be a number of seconds"),
        ({"source": "6", "timeout_s": True}, "timeout_s = True: must be a number of seconds"),
    ],
)
def test_a_value_of_another_type_is_refused_where_it_is_sent(
    capsule: Capsule, arguments: dict[str, Any], error: str
) -> None:
    for send in (capsule.execute, capsule.execute.delay, capsule.execute.s, capsule.execute.si):
        with pytest.raises(TypeError, match=error):
            send(**arguments)


def test_a_time_that_is_none_and_a_source_that_cannot_be_sent_are_refused(
    capsule: Capsule,
) -> None:
    for timeout_s in (0, -1, float("nan")):
        with pytest.raises(ValueError, match=f"timeout_s = {timeout_s}"):
            capsule.execute("1", timeout_s=timeout_s)
    with pytest.raises(ValueError, match="source cannot be sent"):
        capsule.execute("'\ud800'")


def test_an_unknown_argument_is_refused_where_it_is_sent(capsule: Capsule) -> None:
    with pytest.raises(TypeError, match="profil"):
        capsule.execute.s("1", profil="sandbox")
    with pytest.raises(TypeError):
        capsule.execute.s("1", "2")


@pytest.mark.parametrize(
    ("name", "message"),
    [("timeout", "did you mean timeout_s"), ("sesion", "did you mean session"), ("zz", "'zz'$")],
)
def test_an_argument_that_is_no_option_of_celery_is_refused(
    capsule: Capsule, name: str, message: str
) -> None:
    options: dict[str, Any] = {name: 1}
    with pytest.raises(TypeError, match=f"no argument '{name}'.*{message}|{message}"):
        capsule.execute("1", **options)


def test_the_task_is_there_before_and_after_the_app_is_finalized(app: Celery) -> None:
    assert Capsule(app).execute.s("1").task == CODE_TASK
    assert app.finalized
    late = Celery("late", set_as_current=False)
    late.finalize()
    assert Capsule(late).execute.s("1").type.app is late
    assert app.tasks[CODE_TASK].app is app, "each app has a task of its own"


def test_the_options_of_a_call_are_celerys(app: Celery, capsule: Capsule) -> None:
    execution = capsule.execute("1", timeout_s=2, queue="code", task_id="mine", priority=3)
    assert isinstance(execution, Execution)
    assert execution.id == "mine"
    with app.connection_for_read() as connection:
        message = connection.SimpleQueue("code").get(timeout=5)
        message.ack()
    args, kwargs, _ = message.payload
    assert (args, kwargs) == (["1"], {"profile": "sandbox", "timeout_s": 2})
    assert message.headers["task"] == CODE_TASK


def test_a_signature_takes_its_source_from_the_task_before_in_a_chain(capsule: Capsule) -> None:
    steps = chain(capsule.execute.s("'2'"), capsule.execute.s(profile="gpu"))
    assert [step.args for step in steps.tasks] == [("'2'",), ()]
    assert steps.tasks[1].kwargs == {"profile": "gpu"}
    assert capsule.execute.si("1").immutable


def test_code_does_not_run_in_another_pool(app: Celery, capsule: Capsule) -> None:
    with pytest.raises(CodeNotRun, match="taskpool:TaskPool"):
        capsule.execute.s("1").apply().get()
    with pytest.raises(TypeError):
        app.tasks[CODE_TASK].run(1)


def test_the_arguments_in_a_worker_have_the_defaults_of_the_producer() -> None:
    assert arguments_of("1") == ("1", "sandbox", None)
    assert arguments_of("1", profile="gpu", timeout_s=2.5) == ("1", "gpu", 2.5)


def test_an_error_of_code_survives_a_result_backend_and_a_pickle() -> None:
    error = CodeFailed("ValueError", "no", "Traceback (most recent call last):\n")
    stored = CodeFailed(*json.loads(json.dumps(error.args)))
    for found in (stored, pickle.loads(pickle.dumps(error))):
        assert (found.type, found.message, found.kind) == ("ValueError", "no", "raised")
        assert str(found) == "ValueError: no"
        assert repr(found) == "CodeFailed('ValueError', 'no')"
        assert found.__notes__ == ["Traceback (most recent call last):\n"]
