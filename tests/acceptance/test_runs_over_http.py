"""Durable runs of openai-agents on a real worker, whose model is behind HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from capsule_tasks import Capsule
from capsule_tasks.client.runs.handle import RunHandle
from capsule_tasks.errors import RunCancelled, RunFailed
from capsule_tasks.protocol.messages import RunEvent
from tests.acceptance.workers import HANG_S, Worker, eventually
from tests.agents_script import calls, says
from tests.integration.responses_server import KEY, Refusal, Reply, ResponsesServer

REFUND = calls("refund", '{"euros": 9}', "c_refund")


class Desk:
    """A model server and a worker whose agent asks it."""

    def __init__(self, server: ResponsesServer, worker: Worker) -> None:
        self.server = server
        self.worker = worker

    def start(self, *answers: Any, given: str = "help") -> RunHandle:
        self.server.add(*answers)
        return Capsule(self.worker.app).runs.start("support", given)


@pytest.fixture(scope="module")
def desk(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    with (
        ResponsesServer() as server,
        Worker(
            redis_url,
            tmp_path_factory.mktemp("desk"),
            app="tests.acceptance.others.support_app",
            TEST_MODEL_URL=server.url,
            TEST_MODEL_KEY=KEY,
            TEST_LEASE="2",
        ) as worker,
    ):
        yield Desk(server, worker)


def raw(events: Any) -> Iterator[str]:
    """The kinds of the model's events."""
    for event in events:
        if isinstance(event.message, RunEvent) and event.message.kind == "raw_response_event":
            yield event.message.data["type"]


def test_an_approval_and_what_the_model_was_asked(desk: Desk) -> None:
    before = len(desk.server.requests)
    run = desk.start([REFUND], says("I refunded 9 euros."))
    eventually(lambda: run.state().status == "interrupted", "a call that waits")
    run.approve("c_refund", by="ann")
    assert run.result(timeout_s=HANG_S) == "I refunded 9 euros."
    assert run.execution.get(timeout=HANG_S) == "I refunded 9 euros."
    _, second = desk.server.requests[before:]
    assert second.body["input"][-1]["output"] == "refunded 9 euros"
    assert KEY not in desk.worker.log


def test_deltas_arrive_while_the_model_still_answers(desk: Desk) -> None:
    held = desk.server.held
    run = desk.start(Reply([says("one two three four")], held_after=6))
    kinds = raw(run.events())
    first = [next(kinds) for _ in range(6)]
    assert first[-1] == "response.output_text.delta"
    assert desk.server.held == held + 1
    assert run.state().status == "running"
    desk.server.release()
    assert list(kinds)[-1] == "response.completed"
    assert run.result(timeout_s=HANG_S) == "one two three four"


def test_a_cancel_closes_the_request_of_the_model(desk: Desk) -> None:
    held, abandoned = desk.server.held, desk.server.abandoned
    run = desk.start(Reply([says("never heard")], held_after=5))
    desk.server.wait_until(lambda: desk.server.held > held)
    run.cancel(by="ann")
    desk.server.wait_until(lambda: desk.server.abandoned > abandoned)
    with pytest.raises(RunCancelled, match="ann"):
        run.result(timeout_s=HANG_S)


def test_an_error_of_the_server_fails_the_run(desk: Desk) -> None:
    run = desk.start(Refusal(400, message="no such model"))
    with pytest.raises(RunFailed, match="no such model") as caught:
        run.result(timeout_s=HANG_S)
    assert caught.value.kind == "model"


def test_a_killed_child_repeats_no_request(desk: Desk) -> None:
    """The tool that kills it runs once its reply is in the journal."""
    before = len(desk.server.requests)
    run = desk.start([calls("look", '{"what": "death"}', "c1")], says("still here"))
    assert run.result(timeout_s=HANG_S) == "still here"
    asked, again = desk.server.requests[before:]
    assert again.body["input"][-1]["output"] == "saw death"
    assert len(asked.body["input"]) == 1
