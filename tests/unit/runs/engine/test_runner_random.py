"""Random runs that are cut, resumed and decided on: the history is coherent all the way.

The model asks for random calls; the run is cancelled at random awaits, fails, waits for people,
and goes on from its state, until its model says the last word. What tools have done is in the
history once, and nothing else is; no model ever sees half of a pair.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from capsule_tasks.errors import RunStopped
from capsule_tasks.runs import RunState
from capsule_tasks.runs.agents.agent import Agent
from capsule_tasks.runs.agents.functions import function_tool
from capsule_tasks.runs.engine.ports import UNCERTAIN
from capsule_tasks.runs.engine.runner import Runner
from capsule_tasks.runs.items import without_orphans
from capsule_tasks.runs.models.model import ModelRequest
from capsule_tasks.testing.models import ScriptedModel, calls, reasons
from tests.unit.runs.engine.runs import MemorySession, spelled

KINDS = ("act", "act", "ask", "fail", "tell", "inner", "unknown", "hand_over")
replies = st.lists(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3), max_size=5)


class World:
    """An agent with a tool of each kind, and what the tools have done."""

    def __init__(self, script: list[list[str]], inner: list[list[str]]) -> None:
        self.made: list[str] = []
        self.session = MemorySession([{"role": "user", "content": "earlier"}])
        self._number = 0

        async def act(name: str) -> str:
            await asyncio.sleep(0)
            self.made.append(name)
            await asyncio.sleep(0)
            return f"made {name}"

        async def fail(name: str) -> str:
            await asyncio.sleep(0)
            raise ValueError(name)

        tools: list[Any] = [
            function_tool(name="act")(act),
            function_tool(name="ask", needs_approval=True)(act),
            function_tool(name="fail", on_error="raise")(fail),
            function_tool(name="tell")(fail),
        ]
        self.seen: list[ModelRequest] = []
        inner_agent = Agent(name="Inner", model=self._model(inner, "inside-"), tools=tools)
        other = Agent(name="Other", model=self._model(script[3:]), tools=tools)
        tools = [*tools, inner_agent.as_tool()]
        self.agent = Agent(
            name="Agent", model=self._model(script[:3]), tools=tools, handoffs=[other]
        )

    def _model(self, script: list[list[str]], prefix: str = "") -> ScriptedModel:
        left = list(script)

        def reply(request: ModelRequest) -> Any:
            assert without_orphans(request.input) == list(request.input)
            if not left:
                return [reasons("hm"), "done"]
            return [reasons("hm"), *(self._call(kind, prefix) for kind in left.pop(0))]

        class Endless(ScriptedModel):
            def choose(self, request: ModelRequest) -> tuple[int, Any]:
                return len(self.requests), reply(request)

        return Endless()

    def _call(self, kind: str, prefix: str) -> Any:
        self._number += 1
        call_id = f"{prefix}{kind}{self._number}"
        if kind == "hand_over":
            return calls("transfer_to_other", {}, call_id)
        return calls(kind, {"input" if kind == "inner" else "name": call_id}, call_id)

    def check(self) -> None:
        items = self.session.items
        assert asyncio.all_tasks() == {asyncio.current_task()}
        short = spelled(items)
        ids = [each for each in short if each.startswith(("call", "output"))]
        assert len(ids) == len(set(ids))
        assert short.count("user hi") <= 1
        outputs = dict(each.split(" ", 2)[1:] for each in short if each.startswith("output"))
        made = {each for each in self.made if not each.startswith("inside-")}
        uncertain = {each for each, output in outputs.items() if output == UNCERTAIN}
        known = {each for each, output in outputs.items() if output == f"made {each}"}
        assert known <= made <= known | uncertain
        assert len(self.made) == len(set(self.made))


@settings(max_examples=60, deadline=None)
@given(
    script=replies,
    inner=replies,
    cuts=st.lists(st.integers(0, 60), max_size=4),
    choices=st.lists(st.sampled_from(["approve", "reject", "wait"]), max_size=6),
    streamed=st.booleans(),
)
def test_the_history_is_coherent_all_the_way(
    script: list[list[str]],
    inner: list[list[str]],
    cuts: list[int],
    choices: list[str],
    streamed: bool,
) -> None:
    asyncio.run(_driven(World(script, inner), cuts, choices, streamed))


async def _driven(world: World, cuts: list[int], choices: list[str], streamed: bool) -> None:
    state: RunState | str = "hi"
    for _ in range(60):
        stream = Runner.run_streamed(world.agent, state, session=world.session, max_turns=100)
        if cuts:
            for _ in range(cuts.pop()):
                await asyncio.sleep(0)
            stream.cancel("now" if streamed else "after_turn")
        with suppress(RunStopped):
            async for _event in stream.events():
                pass
        world.check()
        if stream.final_output is not None:
            break
        if not world.session.items[1:]:
            continue  # it was cut before its input was stored
        now = RunState.from_string(stream.state.to_string())
        for call in now.unresolved():
            choice = choices.pop() if choices else "approve"
            if choice != "wait":
                now = getattr(now, choice)(call.call_id)
        state = now
    assert stream.final_output == "done"
    short = spelled(world.session.items)
    assert short[-1] == "says done"
    assert without_orphans(world.session.items) == world.session.items
