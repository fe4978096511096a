"""Guardrails of runs that go on, and several guardrails at once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from capsule_tasks.errors import GuardrailTripped, ModelFailed
from capsule_tasks.runs import RunState
from capsule_tasks.runs.agents.agent import Agent
from capsule_tasks.runs.agents.guardrails import InputGuardrail, OutputGuardrail, Verdict
from capsule_tasks.testing.models import ScriptedModel
from tests.unit.runs.engine.runs import MODES, MemorySession, Mode, spelled


class Checks:
    """Guardrails that note when they run, and what they find each time."""

    def __init__(self) -> None:
        self.run: list[str] = []

    def of_input(
        self, label: str, parallel: bool, *found: bool, name: str | None = None
    ) -> InputGuardrail:
        left = list(found)

        async def check(*_about: Any) -> Verdict:
            self.run.append(label)
            return Verdict(left.pop(0))

        return InputGuardrail(check, name or label, parallel)


@pytest.mark.parametrize("mode", MODES)
async def test_a_guardrail_that_let_the_input_pass_does_not_run_again(mode: Mode) -> None:
    checks = Checks()
    guardrails = [
        checks.of_input("a", mode.parallel, False),
        checks.of_input("b", mode.parallel, True, False),
    ]
    model = ScriptedModel(["done"] if not mode.parallel else ["void", "done"])
    agent = Agent(name="Agent", model=model, input_guardrails=guardrails)
    session = MemorySession()
    error = (await mode.run(agent, "hi", session=session)).error
    assert isinstance(error, GuardrailTripped)
    state = RunState.from_string(error.state.to_string())
    assert (await mode.run(agent, state, session=session)).result.final_output == "done"
    assert checks.run == ["a", "b", "b"]
    assert spelled(session.items) == ["user hi", "says done"]


@pytest.mark.parametrize("mode", MODES)
async def test_a_guardrail_that_runs_again_gets_the_same_input(mode: Mode) -> None:
    given: list[Any] = []

    def check(_run: Any, _agent: Agent, about: Any) -> Verdict:
        given.append(about)
        return Verdict(len(given) == 1)

    model = ScriptedModel(["done"] if not mode.parallel else ["void", "done"])
    guardrails = [InputGuardrail(check, "check", mode.parallel)]
    agent = Agent(name="Agent", model=model, input_guardrails=guardrails)
    session = MemorySession([{"role": "user", "content": "earlier"}])
    error = (await mode.run(agent, "hi", session=session)).error
    assert error is not None
    await mode.run(agent, RunState.from_string(error.state.to_string()), session=session)
    assert given == ["hi", "hi"]
    assert spelled(session.items) == ["user earlier", "user hi", "says done"]


@pytest.mark.parametrize("mode", MODES)
async def test_a_tripped_guardrail_is_not_hidden_by_one_of_its_name(mode: Mode) -> None:
    checks = Checks()
    guardrails = [
        checks.of_input("a", mode.parallel, False, False, name="check"),
        checks.of_input("b", mode.parallel, True, True, name="check"),
    ]
    agent = Agent(name="Agent", model=ScriptedModel(["void"] * 2), input_guardrails=guardrails)
    session = MemorySession()
    error = (await mode.run(agent, "hi", session=session)).error
    assert error is not None
    error = (await mode.run(agent, error.state, session=session)).error
    assert isinstance(error, GuardrailTripped)
    assert checks.run == ["a", "b", "a", "b"]
    assert spelled(session.items) == ["user hi"]


@pytest.mark.parametrize("mode", MODES)
async def test_guardrails_that_passed_do_not_run_again_after_a_failure_of_the_model(
    mode: Mode,
) -> None:
    checks = Checks()
    guardrail = checks.of_input("a", False, False)
    model = ScriptedModel([OSError("down"), "done"])
    agent = Agent(name="Agent", model=model, input_guardrails=[guardrail])
    session = MemorySession()
    error = (await mode.run(agent, "hi", session=session)).error
    assert isinstance(error, ModelFailed)
    assert (await mode.run(agent, error.state, session=session)).result.final_output == "done"
    assert checks.run == ["a"]
    assert spelled(session.items) == ["user hi", "says done"]


@pytest.mark.parametrize("mode", MODES)
async def test_the_other_guardrails_of_an_output_end_with_the_one_that_trips(mode: Mode) -> None:
    ended: list[str] = []

    async def waits(*_about: Any) -> Verdict:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("waits")
        return Verdict()

    guardrails = [
        OutputGuardrail(waits, "waits"),
        OutputGuardrail(lambda *_about: Verdict(True), "trips"),
    ]
    agent = Agent(name="Agent", model=ScriptedModel(["done"]), output_guardrails=guardrails)
    session = MemorySession()
    error = (await mode.run(agent, "hi", session=session)).error
    assert isinstance(error, GuardrailTripped)
    assert error.guardrail == "trips"
    assert ended == ["waits"]
    assert spelled(session.items) == ["user hi"]
