"""Guardrails made of functions."""

from __future__ import annotations

from typing import Any

import pytest

from capsule_tasks.errors import InvalidSetting
from capsule_tasks.runs.agents.agent import Agent
from capsule_tasks.runs.agents.contexts import RunContext, ToolContext
from capsule_tasks.runs.agents.guardrails import (
    InputGuardrail,
    OutputGuardrail,
    ToolGuardrail,
    ToolVerdict,
    Verdict,
    input_guardrail,
    output_guardrail,
    tool_input_guardrail,
    tool_output_guardrail,
)


def test_a_function_becomes_a_guardrail_with_its_name() -> None:
    @input_guardrail
    def polite(ctx: RunContext, agent: Agent, given: Any) -> Verdict:
        return Verdict(tripped="damn" in given)

    @output_guardrail
    async def short(ctx: RunContext, agent: Agent, output: Any) -> Verdict:
        return Verdict(tripped=len(output) > 9)

    @tool_input_guardrail
    def small(ctx: ToolContext) -> ToolVerdict:
        return ToolVerdict("reject", "too much")

    @tool_output_guardrail
    def clean(ctx: ToolContext, output: str) -> ToolVerdict:
        return ToolVerdict()

    assert isinstance(polite, InputGuardrail)
    assert (polite.name, polite.parallel) == ("polite", True)
    assert isinstance(short, OutputGuardrail)
    assert short.name == "short"
    assert isinstance(small, ToolGuardrail)
    assert (small.name, small.before_approval) == ("small", False)
    assert clean.name == "clean"


def test_options_are_given_in_parentheses() -> None:
    first = input_guardrail(name="first", parallel=False)(lambda _ctx, _agent, _given: Verdict())
    early = tool_input_guardrail(name="early", before_approval=True)(lambda _ctx: ToolVerdict())
    assert (first.name, first.parallel) == ("first", False)
    assert (early.name, early.before_approval) == ("early", True)


@pytest.mark.parametrize(
    ("decorate", "name"),
    [
        (lambda: input_guardrail(lambda: 1), r"InputGuardrail\(<lambda>\)\.check"),
        (lambda: output_guardrail(lambda a: a), r"OutputGuardrail\(<lambda>\)\.check"),
        (lambda: tool_input_guardrail(lambda: 1), r"ToolGuardrail\(<lambda>\)\.check"),
        (lambda: input_guardrail(name="")(lambda a, b, c: a), r"InputGuardrail\.name = ''"),
        (lambda: input_guardrail(parallel=1)(lambda a, b, c: a), "parallel = 1"),
        (lambda: Verdict(tripped="yes"), "Verdict.tripped"),  # type: ignore[arg-type]
        (lambda: ToolVerdict("deny"), "ToolVerdict.behavior"),  # type: ignore[arg-type]
        (lambda: ToolVerdict("reject", 3), "ToolVerdict.message"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_guardrail_is_named(decorate: Any, name: str) -> None:
    with pytest.raises(InvalidSetting, match=name):
        decorate()
