"""Models through the official client, over real sockets, from a server that a test scripted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import product
from typing import Any

import pytest

from capsule_tasks.errors import ModelFailed
from capsule_tasks.runs import Agent, Runner, function_tool
from capsule_tasks.runs.models.calling import call_model
from capsule_tasks.runs.models.model import (
    Model,
    ModelDelta,
    ModelReply,
    ModelRequest,
    ModelRetries,
    ModelSettings,
    OutputSchema,
    ToolSpec,
)
from capsule_tasks.runs.models.openai_chat import OpenAIChat
from capsule_tasks.runs.models.openai_responses import OpenAIResponses
from capsule_tasks.runs.models.provider import OpenAIModels, default_model, default_models
from capsule_tasks.runs.records import Item
from capsule_tasks.testing.models import calls, reasons, refuses, says
from tests.integration.responses_server import BEFORE_HEADERS, KEY, Refusal, Reply, ResponsesServer

USER: Item = {"role": "user", "content": "hello"}
LOOK = calls("look", {"where": "under the table"}, "call_1")
ONCE = ModelRetries(attempts=1)
OPEN_CUT = 3
"""So many events or chunks of a text are sent before a cut: some deltas, and not all."""

Kind = type[OpenAIResponses] | type[OpenAIChat]
each_api = pytest.mark.parametrize("kind", [OpenAIResponses, OpenAIChat])
each_way = pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])


@pytest.fixture
def server() -> Iterator[ResponsesServer]:
    with ResponsesServer() as running:
        yield running


@asynccontextmanager
async def opened(kind: Kind, server: ResponsesServer) -> AsyncIterator[Model]:
    model = kind("stand-in-1", base_url=server.url, api_key=KEY)
    try:
        yield model
    finally:
        await model.aclose()


class Shown:
    """The deltas that a watcher of a call was shown."""

    def __init__(self) -> None:
        self.deltas: list[ModelDelta] = []
        self.discarded: list[str] = []

    def text(self, kind: str = "text") -> str:
        return "".join(delta.text for delta in self.deltas if delta.kind == kind)

    def discard(self, failure: ModelFailed) -> None:
        self.discarded.append(failure.why)
        self.deltas.clear()


async def ask(
    model: Model,
    *,
    is_streamed: bool,
    shown: Shown | None = None,
    sleep: Callable[[float], Any] | None = None,
    **request: Any,
) -> ModelReply:
    shown = shown or Shown()
    return await call_model(
        model,
        ModelRequest(**{"input": [USER], **request}),
        on_delta=shown.deltas.append if is_streamed else None,
        on_discarded=shown.discard,
        sleep=sleep or no_pause,
    )


async def no_pause(_: float) -> None:
    """Go on at once."""


def told(items: list[Item]) -> list[Any]:
    """Texts, refusals, and calls with their ids and arguments."""
    found: list[Any] = []
    for item in items:
        if item["type"] == "message":
            found += [part.get("text", part.get("refusal")) for part in item["content"]]
        elif item["type"] == "function_call":
            found.append((item["call_id"], item["name"], item["arguments"]))
        else:
            found.append(item["type"])
    return found


# --- replies -------------------------------------------------------------------------------------


@each_api
@each_way
async def test_a_reply_with_a_text_and_calls(
    kind: Kind, is_streamed: bool, server: ResponsesServer
) -> None:
    pay = calls("pay", '{"euros": 5}', "call_2")
    server.add([says("let me look at it"), LOOK, pay])
    shown = Shown()
    async with opened(kind, server) as model:
        reply = await ask(model, is_streamed=is_streamed, shown=shown, instructions="Be kind.")
    look_at = ("call_1", "look", '{"where": "under the table"}')
    assert told(reply.items) == ["let me look at it", look_at, ("call_2", "pay", '{"euros": 5}')]
    assert (reply.spent.requests, reply.spent.input_tokens, reply.spent.output_tokens) == (1, 10, 5)
    assert reply.request_id == "req_1"
    if is_streamed:
        assert shown.text() == "let me look at it"
        arguments = [delta for delta in shown.deltas if delta.kind == "arguments"]
        assert {delta.call_id for delta in arguments} == {"call_1", "call_2"}
        assert shown.text("arguments") == look_at[2] + pay["arguments"]
    (request,) = server.requests
    assert request.is_streamed is is_streamed
    assert request.headers["authorization"] == f"Bearer {KEY}"
    if kind is OpenAIChat:
        system = {"role": "system", "content": "Be kind."}
        assert request.body["messages"] == [system, USER]
        assert (reply.spent.cached_tokens, reply.spent.reasoning_tokens) == (4, 2)
    else:
        assert (request.body["instructions"], request.body["input"]) == ("Be kind.", [USER])
        assert reply.response_id == "resp_1"


@each_way
async def test_items_of_responses_come_through_as_the_server_sent_them(
    is_streamed: bool, server: ResponsesServer
) -> None:
    items = [
        {**reasons("so"), "id": "rs_1", "encrypted_content": "gAAA"},
        {"type": "thing_of_tomorrow", "id": "t_1", "deep": [{"er": None}]},
        {**says("yes"), "id": "msg_1"},
    ]
    usage = {
        "input_tokens": 100,
        "input_tokens_details": {"cached_tokens": 60, "cache_write_tokens": 30},
        "output_tokens": 20,
        "output_tokens_details": {"reasoning_tokens": 15},
        "total_tokens": 120,
    }
    server.add(Reply(items, fields={"usage": usage}))
    async with opened(OpenAIResponses, server) as model:
        reply = await ask(model, is_streamed=is_streamed)
    assert reply.items == items
    spent = reply.spent
    assert (spent.input_tokens, spent.cached_tokens, spent.cache_write_tokens) == (100, 60, 30)
    assert (spent.output_tokens, spent.reasoning_tokens) == (20, 15)


@each_api
@each_way
async def test_a_refusal_is_a_reply(kind: Kind, is_streamed: bool, server: ResponsesServer) -> None:
    server.add(Reply([refuses("I will not do that")], has_usage=False))
    shown = Shown()
    async with opened(kind, server) as model:
        reply = await ask(model, is_streamed=is_streamed, shown=shown)
    assert reply.items[0]["content"] == [{"type": "refusal", "refusal": "I will not do that"}]
    if is_streamed:
        assert shown.text("refusal") == "I will not do that"


@each_api
async def test_a_whole_conversation_is_sent_back(kind: Kind, server: ResponsesServer) -> None:
    tool = ToolSpec(name="look", description="Look.", parameters={"type": "object"})
    schema = OutputSchema(name="answer", parameters={"type": "object"})
    settings = ModelSettings(tool_choice="look", temperature=0.5, extra={"user": "u1"})
    server.add([LOOK], says("a cat"))
    async with opened(kind, server) as model:
        given = {"tools": (tool,), "output_schema": schema, "settings": settings}
        first = await ask(model, is_streamed=True, **given)
        output = {"type": "function_call_output", "call_id": "call_1", "output": "a cat"}
        items = [USER, *first.items, output]
        assert told((await ask(model, is_streamed=False, input=items, **given)).items) == ["a cat"]
    body = server.requests[1].body
    assert (body["temperature"], body["user"]) == (0.5, "u1")
    if kind is OpenAIResponses:
        assert body["input"] == items
        assert body["tool_choice"] == {"type": "function", "name": "look"}
        assert body["text"]["format"]["name"] == "answer"
    else:
        assert [message["role"] for message in body["messages"]] == ["user", "assistant", "tool"]
        assert body["tool_choice"] == {"type": "function", "function": {"name": "look"}}
        assert body["response_format"]["json_schema"]["name"] == "answer"


async def test_a_conversation_that_the_server_keeps(server: ResponsesServer) -> None:
    server.add(says("one"), says("two"))
    async with opened(OpenAIResponses, server) as model:
        first = await ask(model, is_streamed=False)
        await ask(model, is_streamed=True, previous_response_id=first.response_id)
    assert server.requests[1].body["previous_response_id"] == "resp_1"


async def test_items_are_compacted(server: ResponsesServer) -> None:
    compaction = {"type": "compaction", "id": "cmp_1", "encrypted_content": "gAAA"}
    message = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]}
    server.add([message, compaction], [compaction])
    async with opened(OpenAIResponses, server) as model:
        assert isinstance(model, OpenAIResponses)
        reply = await model.compact([USER, says("hi")], instructions="Keep the order's number.")
        assert reply.items == [message, compaction]
        assert reply.spent.output_tokens == 5
        await model.compact((), previous_response_id="resp_7")
    first, second = server.requests
    assert first.path.endswith("/responses/compact")
    assert (len(first.body["input"]), first.body["model"]) == (2, "stand-in-1")
    assert first.body["instructions"] == "Keep the order's number."
    assert second.body == {"model": "stand-in-1", "previous_response_id": "resp_7"}


# --- failures ------------------------------------------------------------------------------------


@each_api
@each_way
async def test_a_busy_server_is_asked_again_when_it_says(
    kind: Kind, is_streamed: bool, server: ResponsesServer
) -> None:
    pauses: list[float] = []

    async def pause(pause_s: float) -> None:
        pauses.append(pause_s)

    server.add(Refusal(429, {"retry-after": "7"}), Refusal(500), says("now"))
    settings = ModelSettings(retries=ModelRetries(pause_s=1))
    async with opened(kind, server) as model:
        reply = await ask(model, is_streamed=is_streamed, sleep=pause, settings=settings)
    assert told(reply.items) == ["now"]
    assert pauses[0] == 7
    assert 1 <= pauses[1] <= 2
    assert len(server.requests) == 3


@each_api
@each_way
@pytest.mark.parametrize(
    ("refusal", "is_retryable"),
    [
        (Refusal(400, message="no such parameter"), False),
        (Refusal(429, code="insufficient_quota"), False),
        (Refusal(503, {"x-should-retry": "false"}), False),
        (Refusal(503), True),
    ],
    ids=lambda value: str(getattr(value, "status", value)),
)
async def test_a_refusal_of_the_server_is_a_failure_with_its_status(
    kind: Kind,
    is_streamed: bool,
    refusal: Refusal,
    is_retryable: bool,
    server: ResponsesServer,
) -> None:
    server.add(refusal)
    async with opened(kind, server) as model:
        with pytest.raises(ModelFailed, match=refusal.message) as raised:
            await ask(model, is_streamed=is_streamed, settings=ModelSettings(retries=ONCE))
    error = raised.value
    assert (error.model, error.status) == ("stand-in-1", refusal.status)
    assert error.is_retryable is is_retryable
    assert len(server.requests) == 1, "the client's own retries are off"


@each_api
@each_way
async def test_a_wrong_key_is_not_tried_again(
    kind: Kind, is_streamed: bool, server: ResponsesServer
) -> None:
    server.add(says("never"))
    model = kind("stand-in-1", base_url=server.url, api_key="sk-wrong")
    with pytest.raises(ModelFailed, match=r"401: .*Incorrect API key"):
        await ask(model, is_streamed=is_streamed)
    await model.aclose()
    assert len(server.requests) == 1


@each_api
@each_way
async def test_a_reply_that_is_cut_is_made_again(
    kind: Kind, is_streamed: bool, server: ResponsesServer
) -> None:
    text = "a long text in many pieces"
    server.add(Reply([says(text)], cut_after=5), says(text))
    shown = Shown()
    async with opened(kind, server) as model:
        reply = await ask(model, is_streamed=is_streamed, shown=shown)
    assert told(reply.items) == [text]
    if is_streamed:
        assert shown.text() == text
        assert len(shown.discarded) == 1
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("kind", "ending"),
    [
        (OpenAIResponses, "response.failed"),
        *product([OpenAIResponses, OpenAIChat], ["", "error", "response.incomplete"]),
    ],
)
async def test_a_stream_that_ends_without_a_complete_reply_is_a_failure(
    kind: Kind, ending: Any, server: ResponsesServer
) -> None:
    server.add(Reply([says("a text")], ending=ending))
    expected = {
        "": "its stream ended before the reply was complete",
        "error": "server_error: broken",
        "response.incomplete": "incomplete: (length|max_output_tokens)",
        "response.failed": "server_error: the model broke down",
    }
    async with opened(kind, server) as model:
        with pytest.raises(ModelFailed, match=expected[ending]) as raised:
            await ask(model, is_streamed=True, settings=ModelSettings(retries=ONCE))
    assert raised.value.is_retryable is (ending != "response.incomplete")


async def test_a_response_that_is_not_complete_is_a_failure(server: ResponsesServer) -> None:
    incomplete = {"status": "incomplete", "incomplete_details": {"reason": "content_filter"}}
    failed = {"status": "failed", "error": {"code": "invalid_prompt", "message": "too odd"}}
    server.add(Reply([], fields=incomplete), Reply([], fields=failed))
    async with opened(OpenAIResponses, server) as model:
        with pytest.raises(ModelFailed, match="its reply is incomplete: content_filter"):
            await ask(model, is_streamed=False)
        with pytest.raises(ModelFailed, match="invalid_prompt: too odd"):
            await ask(model, is_streamed=False)


@each_api
@each_way
async def test_a_slow_server_is_left_after_the_time_limit(
    kind: Kind, is_streamed: bool, server: ResponsesServer
) -> None:
    server.add(Reply([says("late")], held_after=OPEN_CUT if is_streamed else BEFORE_HEADERS))
    settings = ModelSettings(timeout_s=0.1, retries=ONCE)
    async with opened(kind, server) as model:
        with pytest.raises(ModelFailed, match=r"longer than 0.1 s") as raised:
            await ask(model, is_streamed=is_streamed, settings=settings)
    assert raised.value.is_retryable


@each_api
@each_way
async def test_a_cancelled_call_leaves_the_server(
    kind: Kind, is_streamed: bool, server: ResponsesServer
) -> None:
    server.add(Reply([says("late")], held_after=OPEN_CUT if is_streamed else BEFORE_HEADERS))
    async with opened(kind, server) as model:
        call = asyncio.create_task(ask(model, is_streamed=is_streamed))
        await asyncio.to_thread(server.wait_until, lambda: server.held == 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.to_thread(server.wait_until, lambda: server.abandoned == 1)


async def test_a_server_that_is_not_there_may_come_back() -> None:
    with ResponsesServer() as gone:
        url = gone.url
    model = OpenAIResponses("stand-in-1", base_url=url, api_key=KEY)
    with pytest.raises(ModelFailed, match="Connection error") as raised:
        await ask(model, is_streamed=False, settings=ModelSettings(retries=ONCE))
    await model.aclose()
    assert raised.value.is_retryable


# --- an agent ------------------------------------------------------------------------------------


@function_tool
async def look(where: str) -> str:
    """Look somewhere."""
    return f"a cat {where}"


@each_api
async def test_an_agent_calls_its_tool_and_begins_a_cut_reply_again(
    kind: Kind, server: ResponsesServer
) -> None:
    text = "it is a cat, and it is asleep"
    server.add([LOOK], Reply([says(text)], cut_after=5), says(text))
    seen: list[str] = []
    async with opened(kind, server) as model:
        settings = ModelSettings(retries=ModelRetries(pause_s=0))
        agent = Agent(name="a", model=model, tools=[look], model_settings=settings)
        stream = Runner.run_streamed(agent, "What is there?")
        async for event in stream.events():
            if event.kind == "attempt_discarded":
                seen.clear()
            elif event.kind == "text_delta":
                seen.append(event.data["text"])
    assert "".join(seen) == stream.final_output == text
    assert stream.usage.input_tokens == 20
    sent = server.requests[-1].body
    told = str(sent["input"] if kind is OpenAIResponses else sent["messages"])
    assert "a cat under the table" in told
    assert server.requests[1].body == sent


# --- clients and names ---------------------------------------------------------------------------


async def test_names_share_one_connection_and_the_environment_says_where(
    server: ResponsesServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("OPENAI_BASE_URL", server.url)
    server.add(*map(says, ("one", "two", "three")))
    for name in ("gpt-5", "chat/gpt-5", "gpt-5-mini"):
        await ask(default_model(name), is_streamed=False)
    await default_models().aclose()
    assert server.connections == 1
    assert [request.body["model"] for request in server.requests] == [
        "gpt-5",
        "gpt-5",
        "gpt-5-mini",
    ]
    assert [request.path.rpartition("/v1")[2] for request in server.requests] == [
        "/responses",
        "/chat/completions",
        "/responses",
    ]


def test_each_event_loop_has_a_client_and_closes_it_at_its_end(server: ResponsesServer) -> None:
    server.add(*map(says, ("one", "two", "three", "four")))
    models = OpenAIModels(base_url=server.url, api_key=KEY)

    async def run(times: int) -> None:
        for _ in range(times):
            await ask(models("gpt-5"), is_streamed=False)

    asyncio.run(run(2))
    asyncio.run(run(1))
    assert server.connections == 2
    server.wait_until(lambda: server.open_connections == 0)
    assert Runner.run_sync(Agent(name="a", model=models("gpt-5")), "hi").final_output == "four"
    server.wait_until(lambda: server.open_connections == 0)


async def test_a_client_that_was_closed_is_made_anew(server: ResponsesServer) -> None:
    server.add(says("one"), says("two"))
    models = OpenAIModels(base_url=server.url, api_key=KEY)
    for _ in range(2):
        await ask(models("gpt-5"), is_streamed=False)
        await models.aclose()
        await models.aclose()
    assert server.connections == 2


async def test_a_client_that_is_given_stays_open_and_its_retries_are_off(
    server: ResponsesServer,
) -> None:
    server.add(Refusal(500), says("two"))
    async with server.client(max_retries=5) as client:
        models = OpenAIModels(client)
        with pytest.raises(ModelFailed):
            await ask(models("gpt-5"), is_streamed=False, settings=ModelSettings(retries=ONCE))
        await models.aclose()
        assert not client.is_closed()
        await ask(models("gpt-5"), is_streamed=True)
