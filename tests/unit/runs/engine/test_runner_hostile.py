"""Tools, models and guardrails that do what no author expects: each has an end, and is stored."""

from __future__ import annotations

from typing import Any

import pytest

from capsule_tasks.errors import (
    CallbackFailed,
    GuardrailFailed,
    GuardrailTripped,
    InvalidSetting,
    ModelFailed,
    ModelMisbehaved,
)
from capsule_tasks.runs.agents.agent import Agent
from capsule_tasks.runs.agents.functions import function_tool
from capsule_tasks.runs.agents.guardrails import Verdict, input_guardrail, output_guardrail
from capsule_tasks.runs.agents.run_config import RunConfig
from capsule_tasks.runs.engine.runner import Runner
from capsule_tasks.runs.models.model import ModelReply, ModelRequest
from capsule_tasks.testing.models import ScriptedModel, calls
from tests.unit.runs.engine.runs import MODES, MemorySession, Mode


class Panic(BaseException):
    """As libraries in Rust raise it."""


class WithoutText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Replies:
    """A model that answers with anything."""

    def __init__(self, reply: Any) -> None:
        self.reply = reply

    async def get_response(self, request: ModelRequest) -> Any:
        return self.reply

    async def stream_response(self, request: ModelRequest) -> Any:
        yield self.reply


def agent_of(*replies: Any, **options: Any) -> Agent:
    return Agent(name="Agent", model=ScriptedModel(replies), **options)


ERRORS = [StopIteration(5), WithoutText(), Panic("hurt"), SystemExit(3), ValueError("half \ud800")]
TEXTS = ["StopIteration(5)", "WithoutText", "Panic('hurt')", "SystemExit(3)", "half \\ud800"]


@pytest.mark.parametrize(("error", "text"), [*zip(ERRORS, TEXTS, strict=True)], ids=TEXTS)
@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_the_model_is_told_whatever_a_tool_raises(
    error: BaseException, text: str, kind: str
) -> None:
    def look() -> str:
        raise error

    async def look_async() -> str:
        raise error

    function = look if kind == "sync" else look_async
    tool = function_tool(name="look")(function)
    session = MemorySession()
    agent = agent_of(calls("look", {}, "c1"), "done", tools=[tool])
    assert (await Runner.run(agent, "hi", session=session)).final_output == "done"
    output = session.items[2]["output"]
    assert isinstance(error, StopIteration) or text in output
    assert output.startswith("The tool failed: ")
    output.encode()


@pytest.mark.parametrize("part", [{"text": object()}, {"text": "\ud800"}], ids=["object", "half"])
async def test_parts_that_are_not_json_are_an_error_of_the_tool(part: dict[str, Any]) -> None:
    @function_tool
    async def look() -> Any:
        return [{"type": "input_text", **part}]

    session = MemorySession()
    agent = agent_of(calls("look", {}, "c1"), "done", tools=[look])
    assert (await Runner.run(agent, "hi", session=session)).final_output == "done"
    assert session.items[2]["output"].startswith("The tool failed: OutputNotStorable")


CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}


@pytest.mark.parametrize(
    "items",
    [
        None,
        ["text"],
        [None],
        [{"a": 1}],
        [{"type": 5}],
        [{"type": "message", "role": "assistant", "content": b"\xff"}],
        [{"type": "message", "role": "assistant", "content": float("nan")}],
        [{"type": "message", "role": "assistant", "content": object()}],
        [{"type": "message", "role": "assistant", "content": "x", 5: 6}],
        [{**CALL, "namespace": 7}],
    ],
    ids=lambda items: repr(items)[:60],
)
@pytest.mark.parametrize("mode", MODES)
async def test_a_reply_that_is_none_has_an_error_and_the_input_is_stored(
    mode: Mode, items: Any
) -> None:
    session = MemorySession()
    agent = Agent(name="Agent", model=Replies(ModelReply(items=items)))
    ended = await mode.run(agent, "hi", session=session)
    assert isinstance(ended.error, ModelMisbehaved)
    assert session.items == [{"role": "user", "content": "hi"}]


async def test_content_that_is_no_list_has_no_text() -> None:
    reply = ModelReply(items=[{"type": "message", "role": "assistant", "content": 5}])
    agent = Agent(name="Agent", model=Replies(reply))
    assert (await Runner.run(agent, "hi")).final_output == ""


@pytest.mark.parametrize("answer", [17, None], ids=str)
async def test_a_model_that_returns_no_reply_has_failed(answer: Any) -> None:
    session = MemorySession()
    with pytest.raises(ModelFailed, match=f"it returned {answer}, not a ModelReply"):
        await Runner.run(Agent(name="Agent", model=Replies(answer)), "hi", session=session)
    assert session.items == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("error", [WithoutText(), Panic("hurt"), SystemExit(3)], ids=repr)
@pytest.mark.parametrize("mode", MODES)
async def test_a_model_that_exits_has_failed(mode: Mode, error: BaseException) -> None:
    def answer(_request: ModelRequest) -> str:
        raise error

    ended = await mode.run(agent_of(answer), "hi")
    assert isinstance(ended.error, ModelFailed)
    assert type(error).__name__ in str(ended.error)


async def test_a_guardrail_that_exits_has_failed() -> None:
    @output_guardrail
    def exits(_context: Any, _agent: Any, _output: Any) -> Verdict:
        raise SystemExit(1)

    with pytest.raises(GuardrailFailed, match="SystemExit"):
        await Runner.run(agent_of("done", output_guardrails=[exits]), "hi")


async def test_text_of_a_model_that_utf8_lacks_is_escaped() -> None:
    session = MemorySession()
    result = await Runner.run(agent_of("half \ud800"), "hi", session=session)
    assert result.final_output == "half \\ud800"
    assert session.items[1]["content"][0]["text"] == "half \\ud800"


async def test_a_rejection_that_utf8_lacks_is_escaped() -> None:
    @function_tool(needs_approval=True)
    async def look() -> str:
        return "seen"

    agent = agent_of(calls("look", {}, "c1"), "done", tools=[look])
    session = MemorySession()
    waiting = await Runner.run(agent, "hi", session=session)
    rejected = waiting.state.reject("c1", message="half \ud800")
    await Runner.run(agent, rejected, session=session)
    assert session.items[2]["output"] == "half \\ud800"


@pytest.mark.parametrize("given", ["", [], "half \ud800"], ids=ascii)
async def test_an_input_that_a_durable_run_refuses_is_refused(given: Any) -> None:
    session = MemorySession()
    with pytest.raises(InvalidSetting, match="input"):
        await Runner.run(agent_of("done"), given, session=session)
    assert session.items == []


async def test_of_guardrails_with_one_name_none_is_skipped() -> None:
    def made(trips: bool) -> Any:
        @input_guardrail(parallel=False)
        def check(_context: Any, _agent: Any, _given: Any) -> Verdict:
            return Verdict(tripped=trips)

        return check

    agent = agent_of("done", input_guardrails=[made(False), made(True)])
    with pytest.raises(GuardrailTripped) as tripped:
        await Runner.run(agent, "hi")
    with pytest.raises(GuardrailTripped):
        await Runner.run(agent, tripped.value.state)


async def test_instructions_are_text_that_can_be_sent() -> None:
    agent = agent_of("done", instructions=lambda _run, _agent: "half \ud800")
    await Runner.run(agent, "hi")
    assert agent.model.requests[0].instructions == "half \\ud800"
    with pytest.raises(CallbackFailed, match="instructions of agent 'Agent' failed: it returned 5"):
        await Runner.run(agent_of("done", instructions=lambda _run, _agent: 5), "hi")


@pytest.mark.parametrize("mode", MODES)
async def test_a_callback_of_the_session_that_raises_ends_the_run_before_its_first_turn(
    mode: Mode,
) -> None:
    session = MemorySession([{"role": "user", "content": "before"}])
    config = RunConfig(session_input_callback=lambda history, new: [1 / 0, history, new])
    ended = await mode.run(agent_of("Yes."), "Go.", session=session, run_config=config)
    assert isinstance(ended.error, CallbackFailed)
    assert "session_input_callback" in str(ended.error)
    assert ended.error.state.input == "Go."
    assert len(session.items) == 1
