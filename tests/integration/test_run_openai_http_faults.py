"""Durable runs whose model server refuses, breaks off, is slow, or is left in the middle."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from agents import Agent, ModelSettings
from pydantic import BaseModel

from capsule_tasks.durable import RunDriver, RunFailure, RunStop
from capsule_tasks.settings import RunSettings
from capsule_tasks.storage import RunStore
from capsule_tasks.testing import PrivateServer
from tests.agents_script import calls, says
from tests.integration.durable_agents import LOOK, Runs, brief
from tests.integration.http_models import PAY, Clients, cashier
from tests.integration.killing import LASTING
from tests.integration.responses_server import (
    BEFORE_HEADERS,
    KEY,
    MODEL,
    Refusal,
    Reply,
    ResponsesServer,
)

SOON_S = 0.3
ONCE = {"max_retries": 0}
"""The client asks once."""


async def failure_of(runs: Runs) -> RunFailure:
    failure = (await runs.drive()).failure
    assert failure is not None
    return failure


# --- broken streams ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "type_name"),
    [
        pytest.param(Reply([says("half an answer")], cut_after=6), "APIConnectionError", id="cut"),
        pytest.param(Reply([LOOK], cut_after=1), "APIConnectionError", id="cut-early"),
        pytest.param(Reply([LOOK], ending=""), "ModelBehaviorError", id="no-last-event"),
        pytest.param(
            Reply([LOOK], ending="response.incomplete"), "ModelBehaviorError", id="incomplete"
        ),
        pytest.param(Reply([LOOK], ending="response.failed"), "ModelBehaviorError", id="failed"),
        pytest.param(Reply([LOOK], ending="error"), "ModelBehaviorError", id="error"),
    ],
)
async def test_a_stream_that_breaks_fails_the_run_and_keeps_its_history(
    store: RunStore, clients: Clients, answer: Reply, type_name: str
) -> None:
    """Nothing of a reply that is not complete is acted on, journaled or stored."""
    first = calls("look", '{"what": "x"}', "c0")
    with ResponsesServer([first], answer) as server:
        runs = Runs(store, clients.engine(server))
        await runs.start()
        failure = await failure_of(runs)
        assert (failure.kind, failure.type) == ("model", type_name)
        assert len(server.requests) == 2
    assert [item[0] for item in brief(await runs.items())] == [
        "user",
        "function_call",
        "function_call_output",
    ]
    assert (await store.read("r")).status == "failed"


async def test_a_refusal_of_the_model_fails_the_run(store: RunStore, clients: Clients) -> None:
    class Answer(BaseModel):
        number: int

    message = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "refusal", "refusal": "I will not count"}],
    }
    with ResponsesServer([message]) as server:
        runs = Runs(store, clients.engine(server, cashier(output_type=Answer)))
        await runs.start()
        failure = await failure_of(runs)
    assert (failure.kind, failure.type) == ("model", "ModelRefusalError")
    assert "I will not count" in failure.message


async def test_an_answer_in_one_piece_that_breaks_is_asked_for_again(
    store: RunStore, clients: Clients
) -> None:
    clerk = Agent(name="clerk", model=MODEL)
    desk = Agent(name="desk", model=MODEL, tools=[clerk.as_tool("ask_clerk", "Ask.")])
    with ResponsesServer(
        [calls("ask_clerk", '{"input": "x"}', "c1")],
        Reply([says("lost")], cut_after=100),
        says("hello"),
        says("done"),
    ) as server:
        runs = Runs(store, clients.engine(server, desk))
        await runs.start()
        assert (await runs.drive()).result == b'"done"'
    assert ("function_call_output", "c1", "hello") in brief(await runs.items())


async def test_a_reply_too_large_for_the_journal_fails_the_run(
    store: RunStore, clients: Clients, valkey_url: str
) -> None:
    settings = RunSettings(prefix=store.core.settings.prefix, max_journal_bytes=10_000)
    async with RunStore(valkey_url, settings=settings) as small:
        with ResponsesServer(says("wide " * 2_000)) as server:
            runs = Runs(small, clients.engine(server))
            await runs.start()
            failure = await failure_of(runs)
    assert failure.kind == "model"
    assert "10000" in failure.message


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_refused_call_is_made_again(store: RunStore, clients: Clients, status: int) -> None:
    soon = Refusal(status, {"retry-after-ms": "1"})
    with ResponsesServer(soon, soon, [LOOK], soon, says("done")) as server:
        runs = Runs(store, clients.engine(server))
        await runs.start()
        assert (await runs.drive()).result == b'"done"'
        assert len(server.requests) == 5
    assert len(await runs.items()) == 4


async def test_a_call_that_is_always_refused_fails_the_run(
    store: RunStore, clients: Clients
) -> None:
    soon = Refusal(429, {"retry-after-ms": "1"}, "too many tokens a minute")
    with ResponsesServer(*[soon] * 3) as server:
        runs = Runs(store, clients.engine(server))
        await runs.start()
        failure = await failure_of(runs)
        assert (failure.kind, failure.type) == ("model", "RateLimitError")
        assert "too many tokens a minute" in failure.message
    assert brief(await runs.items()) == [("user", None, None)]


async def test_a_server_that_is_not_there_fails_the_run(store: RunStore, clients: Clients) -> None:
    with ResponsesServer() as server:
        engine = clients.engine(server, **ONCE)
    runs = Runs(store, engine)
    await runs.start()
    failure = await failure_of(runs)
    assert failure == RunFailure("model", "APIConnectionError", "Connection error.")


# --- slow servers, and callers that leave --------------------------------------------------------

HOLDS = [
    pytest.param(BEFORE_HEADERS, id="before-headers"),
    pytest.param(5, id="in-the-text"),
]


async def timed_out(runs: Runs, server: ResponsesServer, **options: Any) -> RunStop:
    stop = await RunDriver(runs.store, "w1", **options).drive("r", runs.engine)
    # On a busy machine the time may be over before the server has the request.
    await asyncio.to_thread(server.wait_until, lambda: server.abandoned == server.held)
    assert stop.failure is not None
    assert stop.failure.kind == "timeout"
    assert [item[0] for item in brief(await runs.items())] == ["user"] * (not options)
    return stop


@pytest.mark.parametrize("held_after", HOLDS)
async def test_the_client_s_timeout_ends_the_run(
    store: RunStore, clients: Clients, held_after: int
) -> None:
    with ResponsesServer(Reply([says("hello there")], held_after=held_after)) as server:
        runs = Runs(store, clients.engine(server, timeout=SOON_S, **ONCE))
        await runs.start()
        stop = await timed_out(runs, server)
    assert stop.failure is not None
    assert stop.failure.type in {"APITimeoutError", "ReadTimeout"}


@pytest.mark.parametrize("held_after", HOLDS)
async def test_the_model_s_timeout_ends_the_run(
    store: RunStore, clients: Clients, held_after: int
) -> None:
    agent = cashier(model_settings=ModelSettings(timeout=SOON_S))
    with ResponsesServer(Reply([says("hello there")], held_after=held_after)) as server:
        runs = Runs(store, clients.engine(server, agent))
        await runs.start()
        stop = await timed_out(runs, server)
    assert stop.failure is not None
    assert stop.failure.type == "ModelTimeoutError"


@pytest.mark.parametrize("held_after", HOLDS)
async def test_a_turn_s_timeout_closes_the_request(
    store: RunStore, clients: Clients, held_after: int
) -> None:
    with ResponsesServer(Reply([says("hello there")], held_after=held_after)) as server:
        runs = Runs(store, clients.engine(server))
        await runs.start()
        await timed_out(runs, server, turn_timeout_s=SOON_S)


@pytest.mark.parametrize("held_after", HOLDS)
async def test_a_cancelled_drive_closes_its_request_and_asks_again_later(
    store: RunStore, clients: Clients, held_after: int
) -> None:
    with ResponsesServer(
        Reply([says("never heard")], held_after=held_after), says("heard")
    ) as server:
        runs = Runs(store, clients.engine(server))
        await runs.start()
        before = asyncio.all_tasks()
        drive = asyncio.create_task(runs.drive())
        await asyncio.to_thread(server.wait_until, lambda: server.held)
        drive.cancel()
        with pytest.raises(asyncio.CancelledError):
            await drive
        await asyncio.to_thread(server.wait_until, lambda: server.abandoned)
        assert asyncio.all_tasks() == before
        assert (await store.read("r")).status == "queued"
        assert (await runs.drive()).result == b'"heard"'
    assert [item[0] for item in brief(await runs.items())] == ["user", "message"]


async def test_a_run_that_is_cancelled_while_its_model_answers_is_not_driven_again(
    store: RunStore, clients: Clients
) -> None:
    """What a worker does with a cancel: the run is marked, and the coroutine is cancelled."""
    with ResponsesServer([LOOK], Reply([says("never heard")], held_after=5)) as server:
        runs = Runs(store, clients.engine(server))
        await runs.start()
        drive = asyncio.create_task(runs.drive())
        await asyncio.to_thread(server.wait_until, lambda: server.held)
        await store.cancel("r", by="ann")
        drive.cancel()
        with pytest.raises(asyncio.CancelledError):
            await drive
        await asyncio.to_thread(server.wait_until, lambda: server.abandoned)
    record = await store.read("r")
    assert (record.status, record.cancelled_by) == ("cancelled", "ann")
    kinds = [item[0] for item in brief(await runs.items())]
    assert kinds == ["user", "function_call", "function_call_output"]


# --- the key -------------------------------------------------------------------------------------


async def test_the_key_reaches_neither_redis_nor_logs(
    tmp_path: Path, clients: Clients, caplog: pytest.LogCaptureFixture
) -> None:
    """Everything that was ever written to the server is in its append-only file."""
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.INFO, "httpcore2")  # the transport shows a header that it cannot send
    keys = {"r1": KEY, "r2": "sk-wrong-0123456789", "r3": "sk-broken-0123456789\n"}
    with (
        PrivateServer(tmp_path, aof=True) as redis,
        ResponsesServer([LOOK], [PAY], says("paid it"), says("not heard")) as server,
    ):
        async with RunStore(redis.url) as store:
            await store.lease("w1", LASTING).acquire()
            for run_id, key in keys.items():
                runs = Runs(store, clients.engine(server, api_key=key, **ONCE))
                await runs.start(run_id=run_id)
                status = await runs.to_end(run_id)
                assert status == ("completed" if key == KEY else "failed")
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"paid 5" in written
    for key in keys.values():
        assert key.strip().encode() not in written
        assert key.strip() not in caplog.text
