"""Agents of openai-agents with effects, as the tests of durable runs drive them."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Any

import redis
from agents import (
    Agent,
    AgentHooks,
    ApplyPatchTool,
    CustomTool,
    RunHooks,
    Runner,
    ShellTool,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)

from capsule_tasks import History
from capsule_tasks.durable import Engine, OnUncertain, RunDriver, RunEvent, RunStop, settle
from capsule_tasks.durable.settling import SETTLE
from capsule_tasks.settings import HistorySettings, RunSettings
from capsule_tasks.storage import PendingApproval, RunStore
from capsule_tasks.storage.runs.store import SyncLease
from capsule_tasks.storage.runs.types import ENDED
from tests.agents_script import StatelessModel, calls, says
from tests.integration.killing import LASTING, runs_to_its_end
from tests.integration.openai_tools import custom_call, patch_call, shell_call

set_tracing_disabled(True)

Effect = Callable[[str], None]

STEP = 83
"""Awaits between two kills, where not each of them is tried: a prime, so that none is favoured."""


def brief(items: list[Any]) -> list[tuple[Any, ...]]:
    """What a history has, without what models and the SDK choose freely."""
    return [
        (item.get("type") or item.get("role"), item.get("call_id"), item.get("output"))
        for item in items
    ]


@function_tool
async def look(what: str) -> str:
    return f"saw {what}"


LOOK = calls("look", '{"what": "door"}', "c1")


async def alone(agent: Agent[Any], given: Any = "go", **options: Any) -> tuple[Any, list[Any]]:
    """The same run by the SDK alone: its final output and the items of its session."""
    session = SQLiteSession("alone")
    result = await Runner.run(agent, given, session=session, **options)
    while result.interruptions:
        state = result.to_state()
        for item in state.get_interruptions():
            state.approve(item)
        result = await Runner.run(agent, state, session=session, **options)
    items = await session.get_items()
    session.close()
    return result.final_output, brief(items)


class Log(RunHooks[Any]):
    def __init__(self) -> None:
        self.lines: list[str] = []

    async def on_agent_start(self, context: Any, agent: Any) -> None:
        self.lines.append(f"start {agent.name}")

    async def on_handoff(self, context: Any, from_agent: Any, to_agent: Any) -> None:
        self.lines.append(f"{from_agent.name} to {to_agent.name}")

    async def on_tool_start(self, context: Any, agent: Any, tool: Any) -> None:
        self.lines.append(tool.name)


class AgentLog(AgentHooks[Any]):
    def __init__(self, lines: list[str]) -> None:
        self.lines = lines

    async def on_start(self, context: Any, agent: Any) -> None:
        self.lines.append(f"hook of {agent.name}")


def relay(log: Log) -> Agent[Any]:
    second = Agent(
        name="second", model=StatelessModel([LOOK], [says("done")]), tools=[look],
        hooks=AgentLog(log.lines),
    )  # fmt: skip
    model = StatelessModel([calls("look", '{"what": "x"}', "c0")],
                           [calls("transfer_to_second", "{}", "h")])  # fmt: skip
    return Agent(
        name="first", model=model, tools=[look], handoffs=[second], hooks=AgentLog(log.lines)
    )


def office(effect: Effect, on_call: Callable[[], None] = lambda: None) -> Agent[Any]:
    """Two agents with a handoff; the second one asks a third, who needs an approval to pay."""

    @function_tool
    async def look(what: str) -> str:
        effect(f"look {what}")
        return f"saw {what}"

    @function_tool(needs_approval=True)
    async def pay(euros: int) -> str:
        effect(f"pay {euros}")
        return f"paid {euros}"

    async def shell(request: Any) -> str:
        effect(" ".join(request.data.action.commands))
        return "ran"

    async def query(_: Any, given: str) -> str:
        effect(f"query {given}")
        return "found"

    class Editor:
        async def delete_file(self, operation: Any) -> None:
            effect(f"delete {operation.path}")

    def model(*turns: list[Any]) -> StatelessModel:
        return StatelessModel(*turns, on_call=on_call)

    clerk = Agent(
        name="clerk",
        model=model(
            [calls("look", '{"what": "bill"}', "c_bill")],
            [calls("pay", '{"euros": 5}', "c_pay")],
            [says("paid it")],
        ),
        tools=[look, pay],
    )
    desk = Agent(
        name="desk",
        model=model(
            [calls("ask_clerk", '{"input": "pay"}', "c_ask")],
            [shell_call("c_shell", "ls"), custom_call("c_query", "x"), patch_call("c_del", "f")],
            [says("all done")],
        ),
        tools=[
            clerk.as_tool("ask_clerk", "Ask."),
            ShellTool(executor=shell, needs_approval=True),
            CustomTool(
                name="query",
                description="Query.",
                on_invoke_tool=query,
                needs_approval=True,
                format={"type": "text"},
            ),
            ApplyPatchTool(editor=Editor(), needs_approval=True),  # type: ignore[arg-type]
        ],
    )
    return Agent(
        name="front",
        model=model(
            [
                calls("look", '{"what": "door"}', "c_door"),
                calls("look", '{"what": "desk"}', "c_desk"),
            ],
            [calls("transfer_to_desk", "{}", "c_hand")],
        ),
        tools=[look],
        handoffs=[desk],
    )


def told_of(call: PendingApproval) -> tuple[str, Any]:
    """The effect of a call of the office, and the output that its tool gives."""
    about = json.loads(call.arguments) if call.arguments.startswith("{") else {}
    match call.tool.removeprefix(SETTLE):
        case "bare:look":
            return f"look {about['what']}", f"saw {about['what']}"
        case "bare:pay":
            return f"pay {about['euros']}", f"paid {about['euros']}"
        case "shell:shell":
            return " ".join(about["commands"]), "ran"
        case "custom:query":
            return f"query {call.arguments}", "found"
    return f"delete {about['path']}", None


class Runs:
    """Drives runs of one engine, and decides what waits."""

    def __init__(
        self,
        store: RunStore,
        engine: Engine,
        worker: str = "w1",
        world: Callable[[], Container[str]] = list,
    ) -> None:
        """`world` says which effects there were."""
        self.world = world
        self.store = store
        self.engine = engine
        self.events: list[RunEvent] = []
        self._worker = worker

    async def start(self, given: Any = "go", run_id: str = "r", context: Any = None) -> None:
        snapshot, schema, agent = self.engine.first(given, context)
        await self.store.create(run_id, run_id, snapshot, schema=schema, agent=agent)

    async def drive(self, run_id: str = "r") -> RunStop:
        driver = RunDriver(self.store, self._worker)
        return await driver.drive(run_id, self.engine, publish=self.events.append)

    async def approve_all(self, run_id: str = "r") -> list[str]:
        """Approve each call that waits; their tools and arguments, as people see them."""
        pending = (await self.store.read(run_id)).pending
        for call in pending:
            if call.tool.startswith(SETTLE):
                await self._settle(run_id, call)
            else:
                await self.store.approvals.approve(run_id, call.call_id)
        return [f"{call.tool} {call.arguments}" for call in pending]

    async def _settle(self, run_id: str, call: PendingApproval) -> None:
        """Say what became of a call, as a person who looks at the world."""
        effect, output = told_of(call)
        was_made = effect in self.world()
        await settle(self.store, run_id, call.call_id, made=was_made, output=output)

    async def to_end(self, run_id: str = "r") -> str:
        """Drive a run and approve what waits until it ends; its status."""
        while (status := (await self.store.read(run_id)).status) not in ENDED:
            if status == "interrupted":
                await self.approve_all(run_id)
            else:
                await self.drive(run_id)
        return status

    def history(self, run_id: str) -> History:
        settings = HistorySettings(prefix=self.store.core.settings.prefix)
        return History(run_id, self.store.store, settings=settings)

    async def items(self, run_id: str = "r") -> list[Any]:
        return await self.history(run_id).get_items()


# --- workers that are killed at each await, compared with runs without kills ---------------------


@dataclass(frozen=True)
class Door:
    """The office of an agent library."""

    engine: Callable[[Effect, Callable[[], None], OnUncertain], Engine]
    uncertain: str
    """The text for the model about an uncertain call."""

    def of_office(self) -> Engine:
        return self.engine(print, lambda: None, "park")


class Killer:
    """Runs of the office, driven by processes that die."""

    def __init__(self, url: str, prefix: str, policy: OnUncertain, door: Door) -> None:
        self.door = door
        self.redis = redis.Redis.from_url(url)
        self._url = url
        self._prefix = prefix
        self._policy = policy

    def drive(self, run_id: str, worker: str, dies_at: int | None) -> bool:
        """Start or go on with a run, in a process that dies at this turn of its loop."""

        async def main() -> None:
            client = redis.Redis.from_url(self._url)
            engine = self.door.engine(
                lambda effect: client.rpush(f"{self._prefix}:{run_id}:effects", effect),
                lambda: client.incr(f"{self._prefix}:{run_id}:asked"),
                self._policy,
            )
            async with self.store() as store:
                runs = Runs(store, engine, worker, lambda: self.effects(run_id))
                await runs.to_end(run_id)

        with SyncLease(worker, self._url, settings=LASTING, prefix=self._prefix) as lease:
            lease.acquire()
            is_done = runs_to_its_end(main, dies_at)
            lease.release()
        return is_done

    def start(self, run_id: str) -> None:
        async def main() -> None:
            async with self.store() as store:
                await Runs(store, self.door.of_office()).start("go", run_id)

        asyncio.run(main())

    def store(self) -> RunStore:
        return RunStore(self._url, settings=RunSettings(prefix=self._prefix))

    def effects(self, run_id: str) -> Counter[str]:
        found: Any = self.redis.lrange(f"{self._prefix}:{run_id}:effects", 0, -1)
        return Counter(each.decode() for each in found)

    def asked(self, run_id: str) -> int:
        found: Any = self.redis.get(f"{self._prefix}:{run_id}:asked")
        return int(found)

    def outcome(self, run_id: str) -> tuple[str, bytes, list[Any]]:
        async def main() -> tuple[str, bytes, list[Any]]:
            async with self.store() as store:
                record = await store.read(run_id)
                items = await Runs(store, self.door.of_office()).items(run_id)
                # Tools of several kinds run side by side: the order of their outputs is free.
                return record.status, record.result, sorted(brief(items), key=str)

        return asyncio.run(main())


def kill_points(killer: Killer, step: int) -> Iterator[tuple[int, str]]:
    """Runs that ended after one kill each; a kill comes `step` awaits later in each of them."""
    at = 0
    while True:
        run_id = f"killed-{at}"
        killer.start(run_id)
        if killer.drive(run_id, f"w{at}", at):
            return
        assert killer.drive(run_id, f"w{at}+", None)
        yield at, run_id
        at += step


def ids_of(history: list[Any]) -> list[tuple[Any, Any]]:
    """The items of a history without their outputs."""
    return sorted(((kind, call_id) for kind, call_id, _ in history), key=str)


def check_kills(killer: Killer, policy: OnUncertain, step: int) -> None:
    killer.start("whole")
    assert killer.drive("whole", "w", None)
    status, result, history = killer.outcome("whole")
    assert (status, result) == ("completed", b'"all done"')
    effects, asked = killer.effects("whole"), killer.asked("whole")
    count = 0
    for at, run_id in kill_points(killer, step):
        count += 1
        found_status, found_result, found_history = killer.outcome(run_id)
        assert (found_status, found_result) == (status, result), at
        found = killer.effects(run_id)
        # A model call that was cut before its reply was journaled is made again.
        assert killer.asked(run_id) <= asked + 1, at
        if policy == "retry":
            assert found_history == history, at
            assert found.keys() == effects.keys(), at
        elif policy == "park":
            assert found_history == history, at
            assert found == effects, at
        else:
            assert max(found.values()) == 1, at
            assert ids_of(found_history) == ids_of(history), at
            told = sum(killer.door.uncertain in str(item) for item in found_history)
            assert len(found) >= len(effects) - max(told, 3), at
    assert count > 5
