"""A cancel at every await of a run: the history stays coherent, and nothing is left running."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any

import pytest

from capsule_tasks.runs import RunState
from capsule_tasks.runs.agents.agent import Agent
from capsule_tasks.runs.agents.functions import function_tool
from capsule_tasks.runs.agents.guardrails import InputGuardrail, OutputGuardrail, Verdict
from capsule_tasks.runs.engine.ports import UNCERTAIN
from capsule_tasks.runs.engine.runner import Runner
from capsule_tasks.runs.items import without_orphans
from capsule_tasks.testing.models import ScriptedModel, calls, says
from tests.unit.runs.engine.runs import MODES, MemorySession, Mode, spelled


class Steps:
    """Awaits a coroutine, and cancels the task at its n-th await, and at the m-th after that."""

    def __init__(self, work: Coroutine[Any, Any, Any], cancel_at: set[int]) -> None:
        self._work = work
        self._cancel_at = cancel_at
        self.count = 0

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._work.__await__()
        answer: Any = None
        error: BaseException | None = None
        while True:
            try:
                waited_for = steps.throw(error) if error is not None else steps.send(answer)
            except StopIteration as end:
                return end.value
            self.count += 1
            if self.count in self._cancel_at:
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
            error = None
            try:
                answer = yield waited_for
            except BaseException as raised:  # noqa: BLE001  it is handed on
                error = raised


async def pause() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


class Work:
    """An agent that uses each part of the engine, and what its tools have done."""

    def __init__(self, mode: Mode) -> None:
        self.started: list[str] = []
        self.made: list[str] = []

        async def passing(*_about: Any) -> Verdict:
            await pause()
            return Verdict()

        @function_tool
        async def act(name: str) -> str:
            """Act."""
            self.started.append(name)
            await pause()
            self.made.append(name)
            return name

        async def reply(*items: Any) -> list[Any]:
            await pause()
            return list(items)

        first = [calls("act", {"name": each}, each) for each in ("a", "b")]
        self.inner = inner = Agent(
            name="Inner",
            tools=[act],
            model=ScriptedModel([calls("act", {"name": "i"}, "i"), "inner"]),
        )
        script = [
            lambda _: reply(*first),
            lambda _: reply(calls("inner", {"input": "x"}, "o"), calls("act", {"name": "c"}, "c")),
            lambda _: reply(says("done")),
        ]
        self.session = MemorySession()
        self.agent = Agent(
            name="Agent",
            model=ScriptedModel(script),
            tools=[act, inner.as_tool()],
            input_guardrails=[InputGuardrail(passing, "in", mode.parallel)],
            output_guardrails=[OutputGuardrail(passing, "out")],
        )


WHOLE = [
    *("user hi", "call a", "call b", "output a a", "output b b"),
    *("call o", "call c", "output o inner", "output c c", "says done"),
]


@pytest.mark.parametrize("second_after", [0, 1, 3], ids=lambda n: f"again-after-{n}")
@pytest.mark.parametrize("mode", [each for each in MODES if not each.values[0].streamed])
async def test_a_run_that_is_awaited(mode: Mode, second_after: int) -> None:
    at, cut = 0, 0
    while True:
        at += 1
        work = Work(mode)
        steps = Steps(Runner.run(work.agent, "hi", session=work.session), {at, at + second_after})
        task = asyncio.create_task(awaited(steps))
        await asyncio.wait({task})
        check(work)
        if not task.cancelled():
            assert task.result().final_output == "done"
            break
        cut += 1
    assert spelled(work.session.items) == WHOLE
    assert cut > 15


async def awaited(steps: Steps) -> Any:
    return await steps


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("mode", [each for each in MODES if each.values[0].streamed])
async def test_a_stream_goes_on_from_its_state(mode: Mode, twice: bool) -> None:
    at = 0
    while True:
        at += 1
        work = Work(mode)
        stream = Runner.run_streamed(work.agent, "hi", session=work.session)
        for _ in range(at):
            await asyncio.sleep(0)
        if stream.is_over:
            break
        stream.cancel()
        if twice:
            await asyncio.sleep(0)
            stream.cancel()
        kinds = [event.kind async for event in stream.events()]
        check(work)
        stored = spelled(work.session.items)
        assert ("call o" in stored and "output o inner" not in stored) == bool(stream.state.nested)
        if stored:  # the run goes on, with models that ask for no more calls
            was_inside = bool(stream.state.nested)
            work.agent.model, work.inner.model = ScriptedModel(["again"]), ScriptedModel(["inner"])
            last = await Runner.run(work.agent, stream.state, session=work.session)
            assert last.final_output == "again"
            missing = ["output o inner"] * was_inside
            assert spelled(work.session.items) == [*stored, *missing, "says again"]
            assert work.made.count("i") <= 1
        assert stored[:1] == ["user hi"] or not kinds
    assert at > 20


async def test_a_call_of_an_inner_turn_that_was_cut_is_not_made_again() -> None:
    made: list[str] = []
    entered = asyncio.Event()

    @function_tool
    async def act() -> str:
        """Act."""
        made.append("act")
        return "made"

    @function_tool
    async def wait() -> str:
        """Wait."""
        entered.set()
        await asyncio.Event().wait()
        return ""

    model = ScriptedModel([[calls("act", {}, "i1"), calls("wait", {}, "i2")], "inner"])
    inner = Agent(name="Inner", model=model, tools=[act, wait])
    outer = ScriptedModel([calls("inner", {"input": "x"}, "o"), "done"])
    agent = Agent(name="Agent", model=outer, tools=[inner.as_tool()])
    session = MemorySession()
    stream = Runner.run_streamed(agent, "hi", session=session)
    await entered.wait()
    stream.cancel()
    async for _event in stream.events():
        pass
    assert spelled(session.items) == ["user hi", "call o"]
    state = RunState.from_string(stream.state.to_string())
    assert (await Runner.run(agent, state, session=session)).final_output == "done"
    assert made == ["act"]
    assert spelled(list(model.requests[1].input))[-2:] == [
        "output i1 made",
        f"output i2 {UNCERTAIN}",
    ]


def check(work: Work) -> None:
    """Calls that were made are known, those that are known were made, and nothing runs on."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    assert others == set()
    items = work.session.items
    # A call whose inner run has made calls waits to go on with them, as one for people does.
    assert without_orphans(items, pending={"o"} if "i" in work.started else ()) == items
    outputs = {each["call_id"]: each["output"] for each in items if "output" in each}
    uncertain = {call_id for call_id, output in outputs.items() if output == UNCERTAIN}
    assert set(work.made) - {"i"} <= outputs.keys() - {"o"} <= {*work.made, *uncertain}
    assert uncertain <= set(work.started)
    assert "o" not in outputs or "i" in work.made
    assert len(spelled(items)) == len(set(spelled(items)))
