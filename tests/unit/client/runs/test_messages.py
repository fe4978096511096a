"""The message of a run: what is kept of it, and what is sent again."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from typing import Any

import pytest
from celery import Celery, group, signature
from celery.app.task import Context
from kombu.utils import json

from capsule_tasks.client.runs.messages import (
    RUN_TASK,
    at_once,
    message_of,
    message_of_request,
    send,
    signature_of,
)
from capsule_tasks.errors import InvalidRunState, InvalidSetting


def made() -> Celery:
    """An app with a queue of its own: the broker is shared by the tests of a process."""
    app = Celery("shop", set_as_current=False, broker="memory://", backend="cache+memory://")
    app.conf.task_default_queue = f"q-{uuid.uuid4().hex}"
    return app


@pytest.fixture
def app() -> Celery:
    app = made()

    @app.task(name=RUN_TASK, bind=True, shared=False)
    def run(self: Any, given: Any = None, *, agent: str = "", session: str = "") -> None:
        """Stands for the task of runs."""

    @app.task(name="shop.after", shared=False)
    def after(value: Any) -> None:
        """Linked to a run."""

    app.finalize()
    return app


def delivered(app: Celery) -> tuple[Context, dict[str, Any]]:
    """The request that Celery makes of the next message, and the headers of the message."""
    with app.connection_for_read() as connection:
        message = connection.SimpleQueue(app.conf.task_default_queue).get(timeout=5)
        message.ack()
    args, kwargs, embed = message.payload
    properties = message.properties
    request = {
        **message.headers,
        "args": args,
        "kwargs": kwargs,
        "reply_to": properties.get("reply_to"),
        "delivery_info": {**message.delivery_info, "priority": properties.get("priority")},
        **embed,
    }
    return Context(request, called_directly=False), message.headers


def embedded(request: Context) -> dict[str, Any]:
    """What a message says of the canvas that it belongs to."""
    names = ("id", "root_id", "group", "group_index", "chain", "chord", "callbacks", "errbacks")
    plain: dict[str, Any] = json.loads(json.dumps({name: request.get(name) for name in names}))
    return plain


def test_a_message_is_sent_again_with_its_place_in_the_canvas(app: Celery) -> None:
    run = app.tasks[RUN_TASK].s("refund", agent="support", session="user-1")
    run.set(task_id="run-1", priority=3, ignore_result=False)
    run.link(app.signature("shop.after"))
    run.link_error(app.signature("shop.after"))
    chord = group([run, app.tasks[RUN_TASK].s("x", agent="support")]) | app.signature("shop.after")
    chord.apply_async()
    request, headers = delivered(app)
    delivered(app)  # the other member
    before = embedded(request)
    assert before["chord"], "the run is a member of a chord"
    assert before["group"]

    message = message_of_request(app.tasks[RUN_TASK], request)
    send(app, "run-1", message)

    again, headers_again = delivered(app)
    assert embedded(again) == before
    assert again.delivery_info["priority"] == 3
    assert (again.args, again.kwargs) == ([], {"agent": "support"}), "the input is in the store"
    for name in ("retries", "timelimit", "ignore_result", "parent_id"):
        assert headers_again[name] == headers[name], name


def test_stamps_and_headers_of_a_message_are_kept(app: Celery) -> None:
    run = app.tasks[RUN_TASK].s("x", agent="support").set(task_id="run-1")
    run.stamp(tenant="acme", append_stamps=False)
    run.apply_async(headers={"trace": "abc"})
    request, _ = delivered(app)
    send(app, "run-1", message_of_request(app.tasks[RUN_TASK], request))
    again, headers = delivered(app)
    assert again.stamps == request.stamps
    assert headers["trace"] == "abc"


def test_a_run_that_has_started_waits_for_no_time_and_does_not_expire(app: Celery) -> None:
    run = app.tasks[RUN_TASK].s("x", agent="support").set(task_id="run-1")
    run.apply_async(countdown=3600, expires=7200)
    request, headers = delivered(app)
    assert headers["eta"]
    assert headers["expires"]
    send(app, "run-1", message_of_request(app.tasks[RUN_TASK], request))
    _, again = delivered(app)
    assert (again["eta"], again["expires"]) == (None, None)


def test_a_countdown_of_a_new_run_becomes_a_time(app: Celery) -> None:
    options = {"countdown": 60, "expires": 120, "queue": None}
    before = datetime.now(UTC)
    message = message_of(signature(RUN_TASK, (), {"agent": "a"}, options=options, app=app))
    found = signature_of(app, "run-1", message).options
    assert 60 <= (found["eta"] - before).total_seconds() < 70
    assert 120 <= (found["expires"] - before).total_seconds() < 130
    assert sorted(found) == ["eta", "expires", "task_id"]


def test_a_message_that_is_sent_at_once_has_no_times(app: Celery) -> None:
    options = {"countdown": 60, "expires": 120, "queue": "agents"}
    message = message_of(signature(RUN_TASK, (), {"agent": "a"}, options=options, app=app))
    found = signature_of(app, "run-1", at_once(message))
    assert (found.kwargs, found.options) == (
        {"agent": "a"},
        {"queue": "agents", "task_id": "run-1"},
    )
    assert at_once(at_once(message)) == at_once(message)
    assert at_once(b"no message") == b"no message"


def test_a_message_is_sent_under_the_id_of_its_run(app: Celery) -> None:
    send(app, "run-7", message_of(signature(RUN_TASK, (), {"agent": "a"}, app=app)))
    request, _ = delivered(app)
    assert (request.id, request.root_id, request.kwargs) == ("run-7", "run-7", {"agent": "a"})


def test_a_producer_without_the_task_can_send() -> None:
    bare = made()
    send(bare, "run-8", message_of(signature(RUN_TASK, (), {"agent": "a"}, app=bare)))
    request, headers = delivered(bare)
    assert (request.id, headers["task"]) == ("run-8", RUN_TASK)


def test_what_json_cannot_write_is_refused(app: Celery) -> None:
    with pytest.raises(InvalidSetting, match=r"the options of a run.*JSON"):
        message_of(signature(RUN_TASK, (), {"agent": "a"}, options={"x": object()}, app=app))


@pytest.mark.parametrize("message", [b"", b"{}", b"[1]", b"\xff", b'{"args": [], "kwargs": {}}'])
def test_what_is_no_message_is_refused(app: Celery, message: bytes) -> None:
    with pytest.raises(InvalidRunState, match="the message of run 'run-1'"):
        send(app, "run-1", message)
