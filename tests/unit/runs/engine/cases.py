"""The rules of preparing and saving, as one table for runs in process and durable ones.

Each row: what an agent is given and does, what the history has afterwards, and how the run ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from capsule_tasks.errors import (
    CallbackFailed,
    GuardrailFailed,
    GuardrailTripped,
    MaxTurnsExceeded,
    ModelFailed,
    ModelMisbehaved,
    RunStopped,
    ToolFailed,
)
from capsule_tasks.runs.agents.agent import Agent
from capsule_tasks.runs.agents.functions import function_tool
from capsule_tasks.runs.agents.guardrails import (
    InputGuardrail,
    OutputGuardrail,
    ToolGuardrail,
    ToolVerdict,
    Verdict,
)
from capsule_tasks.runs.agents.handoffs import Handoff
from capsule_tasks.runs.agents.run_config import ModelInput
from capsule_tasks.runs.records import Item
from capsule_tasks.testing.models import calls, hands_over, reasons
from tests.unit.runs.engine.runs import spelled

BEFORE: list[Item] = [
    {"role": "user", "content": "earlier"},
    {"role": "assistant", "content": "answer"},
]
EARLIER = ["user earlier", "says answer"]


@function_tool
async def look(order: int) -> str:
    """Look an order up."""
    return f"order {order}"


@function_tool
async def fail(order: int) -> str:
    """Fail, and have the model told."""
    raise ValueError(f"no order {order}")


@function_tool
async def give_up(order: int) -> str:
    """End with a cancel that nobody has asked for."""
    raise asyncio.CancelledError


@function_tool(on_error="raise")
async def break_down(order: int) -> str:
    """Fail, and end the run."""
    raise ValueError(f"no order {order}")


def judging(tripped: bool | BaseException) -> Callable[..., Verdict]:
    def check(*_about: Any) -> Verdict:
        if isinstance(tripped, BaseException):
            raise tripped
        return Verdict(tripped, info="why")

    return check


async def yielding(*_about: Any) -> Verdict:
    """A verdict that comes after the model's reply, if the model is asked beside it."""
    for _ in range(5):
        await asyncio.sleep(0)
    return Verdict(True)


def of_tool(behavior: Any, message: str | None = None) -> Callable[..., ToolVerdict]:
    return lambda *_about: ToolVerdict(behavior, message)


@dataclass
class Case:
    """A row of the table."""

    replies: list[Any]
    stored: list[str]
    """The items that the run has added to the history."""
    output: Any = None
    error: type[RunStopped] | None = None
    seen: list[list[str]] | None = None
    """The model's view in each call, if that is the point."""
    agent: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    of_input: Callable[..., Any] | None = None
    """The check of a guardrail of the input."""
    of_output: Callable[..., Any] | None = None

    def agent_of(self, *, parallel: bool) -> Agent:
        """The agent of this row, whose guardrail of the input runs beside its model or before."""
        options = dict(self.agent)
        if self.of_input is not None:
            options["input_guardrails"] = [InputGuardrail(self.of_input, "guard", parallel)]
        if self.of_output is not None:
            options["output_guardrails"] = [OutputGuardrail(self.of_output, "guard")]
        return Agent(name="First", **options)

    def check_stored(self, items: list[Item]) -> None:
        """Check what a history has that had BEFORE."""
        stored = spelled(items)
        assert stored[:2] == EARLIER
        pairs = zip(stored[2:], self.stored, strict=True)
        assert [found[: len(wanted)] for found, wanted in pairs] == self.stored


def handed_to(**options: Any) -> dict[str, Any]:
    other = Agent(name="Other")
    return {"handoffs": [Handoff(agent=other, **options)] if options else [other]}


def guarded(**guardrails: Any) -> dict[str, Any]:
    lists = {name: [ToolGuardrail(check, "guard")] for name, check in guardrails.items()}
    return {"tools": [replace(look, **lists)]}


CALL = calls("look", {"order": 1}, "c1")
PAIR = ["call c1", "output c1 order 1"]
TOOLS = {"tools": [look]}
TRIPS = InputGuardrail(judging(True), "trips")

CASES = {
    "a text": Case(["done"], ["user hi", "says done"], "done"),
    "tools": Case(
        [[reasons("hm"), CALL], "done"],
        ["user hi", "reasoning", *PAIR, "says done"],
        "done",
        seen=[[*EARLIER, "user hi"], [*EARLIER, "user hi", "reasoning", *PAIR]],
        agent=TOOLS,
    ),
    "tools side by side keep the order of their calls": Case(
        [[CALL, calls("look", {"order": 2}, "c2")], "done"],
        ["user hi", "call c1", "call c2", "output c1 order 1", "output c2 order 2", "says done"],
        "done",
        agent=TOOLS,
    ),
    "an input that passes": Case(
        [CALL, "done"],
        ["user hi", *PAIR, "says done"],
        "done",
        agent=TOOLS,
        of_input=judging(False),
    ),
    "an input that trips": Case(
        [CALL, "done"], ["user hi"], error=GuardrailTripped, agent=TOOLS, of_input=judging(True)
    ),
    "an input that trips late": Case(
        [CALL, "done"], ["user hi"], error=GuardrailTripped, agent=TOOLS, of_input=yielding
    ),
    "a guardrail of the input that raises": Case(
        [CALL, "done"], ["user hi"], error=GuardrailFailed, agent=TOOLS, of_input=judging(OSError())
    ),
    "a guardrail of the input that is cancelled": Case(
        [CALL],
        ["user hi"],
        error=GuardrailFailed,
        agent=TOOLS,
        of_input=judging(asyncio.CancelledError()),
    ),
    "a guardrail of the input that returns no verdict": Case(
        [CALL], ["user hi"], error=GuardrailFailed, agent=TOOLS, of_input=lambda *_about: True
    ),
    "an output that passes": Case(
        ["done"], ["user hi", "says done"], "done", of_output=judging(False)
    ),
    "an output that trips": Case(
        [CALL, [reasons("hm"), "done"]],
        ["user hi", *PAIR],
        error=GuardrailTripped,
        agent=TOOLS,
        of_output=judging(True),
    ),
    "a guardrail of the output that raises": Case(
        [CALL, "done"],
        ["user hi", *PAIR],
        error=GuardrailFailed,
        agent=TOOLS,
        of_output=judging(OSError()),
    ),
    "a guardrail of the output that is cancelled": Case(
        [CALL, "done"],
        ["user hi", *PAIR],
        error=GuardrailFailed,
        agent=TOOLS,
        of_output=judging(asyncio.CancelledError()),
    ),
    "an output of a tool that trips": Case(
        [CALL],
        ["user hi", *PAIR],
        error=GuardrailTripped,
        agent={**TOOLS, "after_tools": "stop"},
        of_output=judging(True),
    ),
    "a model that fails at once": Case([OSError("down")], ["user hi"], error=ModelFailed),
    "a model that fails later": Case(
        [CALL, OSError("down")], ["user hi", *PAIR], error=ModelFailed, agent=TOOLS
    ),
    "a reply that is not of the output type": Case(
        [CALL, "no number"],
        ["user hi", *PAIR],
        error=ModelMisbehaved,
        agent={**TOOLS, "output_type": int},
    ),
    "a reply of the output type": Case(
        ['{"response": 7}'], ["user hi", 'says {"response": 7}'], 7, agent={"output_type": int}
    ),
    "too many turns": Case(
        [CALL, calls("look", {"order": 2}, "c2"), "done"],
        ["user hi", *PAIR, "call c2", "output c2 order 2"],
        error=MaxTurnsExceeded,
        agent=TOOLS,
        options={"max_turns": 2},
    ),
    "a tool whose error is told": Case(
        [calls("fail", {"order": 1}, "c1"), "sorry"],
        ["user hi", "call c1", "output c1 The tool failed: ValueError: no order 1", "says sorry"],
        "sorry",
        agent={"tools": [fail]},
    ),
    "a tool that raises a cancel of its own": Case(
        [calls("give_up", {"order": 1}, "c1"), "sorry"],
        [
            *("user hi", "call c1"),
            *("output c1 The tool failed: RuntimeError: the tool was cancelled", "says sorry"),
        ],
        "sorry",
        agent={"tools": [give_up]},
    ),
    "a tool that fails the run, beside one that was made": Case(
        [[CALL, calls("break_down", {"order": 2}, "c2")]],
        [
            *("user hi", "call c1", "call c2", "output c1 order 1"),
            "output c2 The tool failed: ValueError: no order 2",
        ],
        error=ToolFailed,
        agent={"tools": [look, break_down]},
    ),
    "wrong arguments": Case(
        [calls("look", {"order": "x"}, "c1"), "sorry"],
        [
            *("user hi", "call c1"),
            "output c1 the arguments of look are wrong",
            "says sorry",
        ],
        "sorry",
        agent=TOOLS,
    ),
    "an unknown tool": Case(
        [calls("shoot", {}, "c1"), "sorry"],
        [
            *("user hi", "call c1"),
            "output c1 There is no tool 'shoot'. The tools are: look.",
            "says sorry",
        ],
        "sorry",
        agent=TOOLS,
    ),
    "a call that a guardrail rejects": Case(
        [CALL, "done"],
        ["user hi", "call c1", "output c1 not today", "says done"],
        "done",
        agent=guarded(input_guardrails=of_tool("reject", "not today")),
    ),
    "an output of a tool that a guardrail rejects": Case(
        [CALL, "done"],
        ["user hi", "call c1", "output c1 secret", "says done"],
        "done",
        agent=guarded(output_guardrails=of_tool("reject", "secret")),
    ),
    "a call that ends the run": Case(
        [CALL],
        [
            *("user hi", "call c1"),
            "output c1 This call was not made: the guardrail 'guard' tripped.",
        ],
        error=GuardrailTripped,
        agent=guarded(input_guardrails=of_tool("raise")),
    ),
    "an output of a tool that ends the run": Case(
        [CALL],
        [
            *("user hi", "call c1"),
            "output c1 This call was made, but its output is withheld: the guardrail 'guard' tripp",
        ],
        error=GuardrailTripped,
        agent=guarded(output_guardrails=of_tool("raise")),
    ),
    "the output of a tool as the final one": Case(
        [CALL], ["user hi", *PAIR], "order 1", agent={**TOOLS, "after_tools": "stop"}
    ),
    "the output of a named tool as the final one": Case(
        [[calls("fail", {"order": 1}, "c0"), CALL]],
        [
            *("user hi", "call c0", "call c1"),
            *("output c0 The tool failed: ValueError: no order 1", "output c1 order 1"),
        ],
        "order 1",
        agent={"tools": [look, fail], "after_tools": frozenset({"look"})},
    ),
    "a function that makes the final output": Case(
        [CALL],
        ["user hi", *PAIR],
        ["look order 1"],
        agent={
            **TOOLS,
            "after_tools": lambda _run, made: [f"{each.tool} {each.output}" for each in made],
        },
    ),
    "a function of the agent that fails": Case(
        [CALL, "done"],
        ["user hi"],
        error=CallbackFailed,
        agent={"instructions": lambda _run, _agent: 1 // 0},
    ),
    "a handoff": Case(
        [[hands_over("Other", call_id="c1"), hands_over("Other", call_id="c2")], "done"],
        [
            *("user hi", "call c1", "call c2"),
            "output c2 Not done: transfer_to_other was called first, and one handoff is made.",
            *('output c1 {"assistant":"Other"}', "says done"),
        ],
        "done",
        agent=handed_to(),
    ),
    "a handoff whose filter narrows the view": Case(
        [hands_over("Other", call_id="c1"), "done"],
        ["user hi", "call c1", 'output c1 {"assistant":"Other"}', "says done"],
        "done",
        seen=[[*EARLIER, "user hi"], ["user hi"]],
        agent=handed_to(input_filter=lambda given: given.earlier[-1:]),
    ),
    "a filter for all handoffs": Case(
        [hands_over("Other", call_id="c1"), "done"],
        ["user hi", "call c1", 'output c1 {"assistant":"Other"}', "says done"],
        "done",
        seen=[[*EARLIER, "user hi"], ["user hi"]],
        agent=handed_to(),
        config={"handoff_input_filter": lambda given: given.earlier[-1:]},
    ),
    "a handoff whose function fails": Case(
        [CALL, hands_over("Other", call_id="c2")],
        ["user hi", *PAIR],
        error=CallbackFailed,
        agent={**TOOLS, **handed_to(on_handoff=lambda _run: 1 // 0)},
    ),
    "a handoff to an agent with guardrails of the input": Case(
        [hands_over("Other", call_id="c1"), "done"],
        ["user hi", "call c1", 'output c1 {"assistant":"Other"}', "says done"],
        "done",
        agent={"handoffs": [Agent(name="Other", input_guardrails=[TRIPS])]},
    ),
    "an output that a guardrail of the configuration trips": Case(
        [CALL, "done"],
        ["user hi", *PAIR],
        error=GuardrailTripped,
        agent=TOOLS,
        config={"output_guardrails": [OutputGuardrail(judging(True), "guard")]},
    ),
    "a filter of the model's input": Case(
        [CALL, "done"],
        ["user hi", *PAIR, "says done"],
        "done",
        seen=[["user hi"], PAIR],
        agent=TOOLS,
        config={
            "input_filter": lambda _run, _agent, given: ModelInput(
                given.items[-1:] if len(given.items) == 3 else given.items[-2:]
            )
        },
    ),
    "a callback that copies, repeats and reorders": Case(
        [CALL, "done"],
        ["user hi", *PAIR, "says done"],
        "done",
        seen=[
            ["user hi", "says answer", "says answer", "user earlier"],
            ["user hi", "says answer", "says answer", "user earlier", *PAIR],
        ],
        agent=TOOLS,
        config={
            "session_input_callback": lambda old, new: [*new, dict(old[1]), old[1], dict(old[0])]
        },
    ),
}
