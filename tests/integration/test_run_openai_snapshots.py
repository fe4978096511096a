"""The snapshot after each turn is the SDK's; a turn serializes no item of the turns before it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from agents import Agent, RunState, handoff

from capsule_tasks.durable import TurnEnd, TurnWork
from capsule_tasks.openai_agents import OpenAIEngine, snapshots
from capsule_tasks.storage import RunStore
from tests.agents_script import StatelessModel, calls, says
from tests.integration.durable_agents import Log, Runs, look, office, relay


class ComparedEngine(OpenAIEngine):
    """Compares the snapshot of each turn with what the SDK alone makes of the same state."""

    compared = 0

    async def turn(self, work: TurnWork) -> TurnEnd:
        end = await super().turn(work)
        if end.live is not None:
            assert json.loads(end.snapshot) == end.live.state.to_json()
            self.compared += 1
        return end


def namesakes() -> Agent[Any]:
    """Three agents of one name, which a snapshot tells apart."""
    third = Agent(
        name="a", instructions="third", model=StatelessModel([says("done")]), tools=[look]
    )
    second = Agent(
        name="a",
        instructions="second",
        model=StatelessModel(
            [calls("look", '{"what": "door"}', "c1")], [calls("go_on", "{}", "h2")]
        ),
        tools=[look],
        handoffs=[handoff(third, tool_name_override="go_on")],
    )
    return Agent(
        name="a",
        model=StatelessModel([calls("go_on", "{}", "h1")]),
        handoffs=[handoff(second, tool_name_override="go_on")],
    )


def looker(turns: int) -> Agent[Any]:
    """An agent that calls a tool in each of so many turns, and then answers."""
    replies = [[calls("look", '{"what": "x"}', f"c{number}")] for number in range(turns)]
    return Agent(name="a", model=StatelessModel(*replies, [says("done")]), tools=[look])


@pytest.mark.parametrize(
    "make",
    [lambda: office(lambda _: None), lambda: relay(Log()), namesakes, lambda: looker(6)],
    ids=["office", "relay", "namesakes", "looker"],
)
async def test_the_snapshot_of_a_turn_is_what_the_sdk_makes(store: RunStore, make: Any) -> None:
    engine = ComparedEngine(make())
    runs = Runs(store, engine)
    await runs.start()
    assert await runs.to_end() == "completed"
    assert engine.compared > 1


async def test_a_turn_serializes_its_own_items_only(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    serialize, serialized = RunState._serialize_item, list[Any]()
    monkeypatch.setattr(
        RunState,
        "_serialize_item",
        lambda self, item, **names: serialized.append(item) or serialize(self, item, **names),
    )
    counts: list[int] = []

    class CountingEngine(OpenAIEngine):
        async def turn(self, work: TurnWork) -> TurnEnd:
            serialized.clear()
            end = await super().turn(work)
            counts.append(len(serialized))
            return end

    runs = Runs(store, CountingEngine(looker(6)))
    await runs.start()
    assert await runs.to_end() == "completed"
    assert len(counts) == 7
    assert len(set(counts[1:-1])) == 1, "the items of earlier turns are not serialized again"


async def test_a_turn_describes_an_agent_at_its_start_and_at_its_end(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    describe, described = snapshots._signature, list[Any]()
    monkeypatch.setattr(
        snapshots, "_signature", lambda agent: described.append(agent) or describe(agent)
    )
    runs = Runs(store, OpenAIEngine(looker(3)))
    await runs.start()
    assert await runs.to_end() == "completed"
    assert len(described) == 2 * 4
