"""Celery's tracer ends the task of code that has run: what it stores, and what it raises."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest
from celery import Celery

from capsule_tasks import Capsule
from capsule_tasks.client.code import CODE_TASK
from capsule_tasks.errors import CodeFailed
from capsule_tasks.protocol.messages import Error, Result, TaskCall
from capsule_tasks.taskpool.code.tracing import CodeTracer


@pytest.fixture
def app() -> Celery:
    app = Celery("shop", set_as_current=False, broker="memory://", backend="cache+memory://")
    Capsule(app)
    return app


def call(body: bytes = b'[["1"], {}, {}]') -> TaskCall:
    task_id = str(uuid4())  # backends in memory share what they store
    return TaskCall(
        name=CODE_TASK,
        task_id=task_id,
        request={"id": task_id, "task": CODE_TASK},
        body=body,
        content_type="application/json",
        content_encoding="utf-8",
    )


def traced(app: Celery, end: Any) -> tuple[Any, Any]:
    """What the tracer reports, and what the result backend has."""
    tracer = CodeTracer(app, "here")
    sent = call()
    result = tracer.trace(sent, tracer.outcome(end))
    return result, app.AsyncResult(sent.task_id)


def test_a_value_is_the_result_of_the_task(app: Celery) -> None:
    result, stored = traced(app, Result(execution_id="id", value={"a": [1, None]}))
    assert (result.text, result.failure) == ("{'a': [1, None]}", None)
    assert stored.get() == {"a": [1, None]}


@pytest.mark.parametrize(
    ("value", "text"),
    [(10**5000, "<int whose repr raised ValueError>"), ({1}, "{1}")],
    ids=["number", "set"],
)
def test_a_value_that_cannot_be_stored_is_stored_as_text(
    app: Celery, value: object, text: str
) -> None:
    assert traced(app, Result(execution_id="id", value=value))[1].get() == text


def test_an_error_is_that_of_the_code_with_notes_that_name_its_limit(app: Celery) -> None:
    end = Error(
        execution_id="id",
        kind="limit",
        type="OSError",
        message="File too large",
        traceback="Traceback…\nnoted by the code\n",
        notes=("noted by the code", "file size limit of 9 bytes"),
    )
    result, stored = traced(app, end)
    assert result.failure.name == "CodeFailed"
    assert not result.escaped_tracer
    with pytest.raises(CodeFailed) as failed:
        stored.get()
    error = failed.value
    assert (error.type, error.message, error.kind) == ("OSError", "File too large", "limit")
    assert error.traceback == "Traceback…\nnoted by the code\nfile size limit of 9 bytes\n"


def test_arguments_that_are_not_those_of_code_fail_the_task(app: Celery) -> None:
    tracer = CodeTracer(app, "here")
    result = tracer.trace(call(b"[[1], {}, {}]"), lambda: None)
    assert (result.failure.name, result.escaped_tracer) == ("TypeError", False)


def test_a_message_that_cannot_be_decoded_escapes_the_tracer_as_that_of_a_task(app: Celery) -> None:
    tracer = CodeTracer(app, "here")
    result = tracer.trace(call(b"["), lambda: None)
    assert result.escaped_tracer


def test_an_outcome_is_known_to_its_own_trace_only(app: Celery) -> None:
    tracer = CodeTracer(app, "here")
    assert tracer.trace(call(), lambda: 1).text == "1"
    with pytest.raises(Exception, match="taskpool:TaskPool"):
        app.tasks[CODE_TASK].run("1")
