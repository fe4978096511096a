"""Tools of realtime agents that run as Celery tasks, and as code, on a real worker."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from capsule_tasks import Agent, Capsule, Execution, History, code_tool, task_tool
from capsule_tasks.client.redis_location import needed_redis_url
from capsule_tasks.errors import RealtimeLost
from capsule_tasks.protocol.events import Ended, Outcome
from capsule_tasks.realtime import (
    RealtimeConfig,
    RealtimeModelConfig,
    RealtimeRunner,
    RealtimeSession,
    RealtimeSettings,
)
from capsule_tasks.realtime.events import RealtimeEvent, RealtimeToolUpdate
from capsule_tasks.runs.engine.ports import UNCERTAIN
from capsule_tasks.testing.models import calls
from capsule_tasks.testing.realtime import RealtimeServer
from capsule_tasks.testing.servers import PrivateServer
from tests.acceptance.others.agent_app import declare_tasks
from tests.acceptance.workers import HANG_S, Worker, close, producer, unique
from tests.severing_proxy import SeveringProxy

APP = "tests.acceptance.others.agent_app"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateServer]:
    with PrivateServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def worker(server: PrivateServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    directory = tmp_path_factory.mktemp("worker")
    with Worker(server.url, directory, app=APP, concurrency=2) as worker:
        yield worker


@pytest.fixture(scope="module")
def tasks(worker: Worker) -> SimpleNamespace:
    return declare_tasks(worker.app)


@pytest.fixture(scope="module")
def capsule(worker: Worker) -> Capsule:
    return Capsule(worker.app)


class Conversation:
    """A session with a scripted model, and the events of it so far."""

    def __init__(self, model: RealtimeServer, session: RealtimeSession, history: History) -> None:
        self.model = model
        self.session = session
        self.history = history
        self.seen: list[RealtimeEvent] = []

    async def until(self, kind: str, update: str | None = None) -> Any:
        """The next event of this kind, or the next `tool_update` of that one."""
        async for event in self.session:
            self.seen.append(event)
            if event.type == kind and update in (None, getattr(event, "kind", None)):
                return event
        raise AssertionError(f"no {update or kind} after {[each.type for each in self.seen]}")

    @property
    def kinds(self) -> list[str]:
        return [each.type for each in self.seen]

    @property
    def text_of_tools(self) -> str:
        """The text that tools have written so far, in whatever pieces it came."""
        updates = [each for each in self.seen if isinstance(each, RealtimeToolUpdate)]
        return "".join(each.data["text"] for each in updates if each.kind == "tool_text")

    async def stored_output(self) -> str:
        """The output of the only call, as the history has it after the close."""
        await self.session.close()
        items = await self.history.get_items()
        (output,) = [item["output"] for item in items if item["type"] == "function_call_output"]
        return str(output)


@asynccontextmanager
async def talking(
    worker: Worker, tool: Any, *script: Any, close_s: float = HANG_S
) -> AsyncIterator[Conversation]:
    """A session whose user has said one thing, which the model answers by this script."""
    agent = Agent(name="tester", tools=[tool])
    in_text = RealtimeSettings(modalities=("text",))
    config = RealtimeConfig(settings=in_text, close_timeout_s=close_s)
    async with (
        History(unique(), needed_redis_url(worker.app)) as history,
        RealtimeServer(script) as model,
    ):
        at_model = RealtimeModelConfig(url=model.url, api_key="none")
        session = RealtimeRunner(agent, config=config).run(model_config=at_model, history=history)
        async with asyncio.timeout(HANG_S), session:
            await session.send_message("go")
            yield Conversation(model, session, history)


def talk(conversation: Awaitable[None]) -> None:
    asyncio.run(conversation)


async def heard(worker: Worker, mark: str) -> None:
    await asyncio.to_thread(worker.heard, mark)


async def outcome(capsule: Capsule, execution: str) -> Outcome:
    """How an execution ended, once it has."""
    async for event in Execution(execution, app=capsule.app).aevents():
        if isinstance(event.message, Ended):
            return event.message.outcome
    raise AssertionError(f"{execution} did not end")


def effects(worker: Worker, key: str) -> int:
    return int(worker.app.backend.client.llen(f"effects:{key}"))


def test_a_task_is_watched_before_it_ends(worker: Worker, tasks: SimpleNamespace) -> None:
    key = unique()

    async def conversation() -> None:
        script = [calls("report", {"key": key}, "c1"), "done"]
        async with talking(worker, task_tool(tasks.report), *script) as talk:
            execution = await talk.until("tool_update", "tool_execution")
            progress = await talk.until("tool_update", "tool_progress")
            assert talk.text_of_tools == "half of it\n"
            assert "tool_end" not in talk.kinds
            worker.go(key)  # only now may the task end
            end = await talk.until("tool_end")
            assert end.output == f"held {key}"
            assert execution.call_id == "c1"
            about = {"tool": "bare:report", "call_id": "c1"}
            assert progress.data == about | {"done": 1.0, "total": 2.0, "note": "half"}
            assert (await talk.until("text_delta")).delta
            assert await talk.stored_output() == f"held {key}"

    talk(conversation())
    assert effects(worker, key) == 1


def test_a_task_waits_for_its_approval(worker: Worker, tasks: SimpleNamespace) -> None:
    key = unique()

    async def conversation() -> None:
        tool = task_tool(tasks.hold, needs_approval=True)
        async with talking(worker, tool, calls("hold", {"key": key}, "c1"), "done") as talk:
            asked = await talk.until("tool_approval_required")
            assert (asked.tool, json.loads(asked.arguments)) == ("hold", {"key": key})
            assert effects(worker, key) == 0
            assert "tool_update" not in talk.kinds
            await talk.session.approve_tool_call("c1")
            await heard(worker, key)
            worker.go(key)
            assert (await talk.until("tool_end")).output == f"held {key}"

    talk(conversation())
    assert effects(worker, key) == 1


def test_a_task_is_cancelled_on_its_worker_when_the_session_closes(
    worker: Worker, capsule: Capsule, tasks: SimpleNamespace
) -> None:
    key = unique()

    async def conversation() -> None:
        script = [calls("hold", {"key": key}, "c1")]
        async with talking(worker, task_tool(tasks.hold), *script) as talk:
            begun = await talk.until("tool_update", "tool_execution")
            await heard(worker, key)
            await talk.session.close()
            assert await outcome(capsule, begun.data["execution"]) == Outcome.CANCELLED
            assert await talk.stored_output() == UNCERTAIN

    talk(conversation())


def test_a_task_is_cancelled_on_its_worker_when_the_model_is_lost(
    worker: Worker, capsule: Capsule, tasks: SimpleNamespace
) -> None:
    key = unique()

    async def conversation() -> None:
        script = [calls("hold", {"key": key}, "c1")]
        async with talking(worker, task_tool(tasks.hold), *script) as talk:
            begun = await talk.until("tool_update", "tool_execution")
            await heard(worker, key)
            talk.model.connection.abort()
            with pytest.raises(RealtimeLost):
                await talk.until("nothing")
            assert await outcome(capsule, begun.data["execution"]) == Outcome.CANCELLED
            assert await talk.stored_output() == UNCERTAIN

    talk(conversation())


def test_code_is_watched_in_the_session_of_the_history(worker: Worker, capsule: Capsule) -> None:
    async def conversation() -> None:
        script = [calls("run_python", {"code": "n = 20\nprint('n is', n)\nn + 1"}, "c1"), "done"]
        async with talking(worker, code_tool(capsule.app), *script) as talk:
            await talk.until("tool_update", "tool_text")
            assert "tool_end" not in talk.kinds
            assert (await talk.until("tool_end")).output == "n is 20\n21"
            assert talk.text_of_tools == "n is 20\n"
            again = capsule.session(talk.history.session_id).execute("n + 2")
            assert await asyncio.to_thread(again.get, timeout=HANG_S) == 22

    talk(conversation())


def test_code_is_stopped_on_its_worker_when_the_session_closes(
    worker: Worker, capsule: Capsule
) -> None:
    async def conversation() -> None:
        script = [calls("run_python", {"code": "print('begun')\nwhile True: pass"}, "c1")]
        async with talking(worker, code_tool(capsule.app), *script) as talk:
            begun = await talk.until("tool_update", "tool_execution")
            await talk.until("tool_update", "tool_text")
            await talk.session.close()
            assert await outcome(capsule, begun.data["execution"]) == Outcome.CANCELLED
            assert await talk.stored_output() == UNCERTAIN

    talk(conversation())


def test_the_question_of_a_task_is_answered_from_anywhere(
    worker: Worker, capsule: Capsule, tasks: SimpleNamespace
) -> None:
    async def conversation() -> None:
        script = [calls("ask", {"question": "Who? "}, "c1"), "done"]
        async with talking(worker, task_tool(tasks.ask), *script) as talk:
            begun = await talk.until("tool_update", "tool_execution")
            question = await talk.until("tool_update", "tool_question")
            assert question.data["prompt"] == "Who? "
            await Execution(begun.data["execution"], app=capsule.app).arespond("Ann")
            assert (await talk.until("tool_end")).output == "It is Ann"

    talk(conversation())


def test_a_close_without_redis_is_bounded_and_names_what_goes_on(
    server: PrivateServer,
    worker: Worker,
    capsule: Capsule,
    caplog: pytest.LogCaptureFixture,
) -> None:
    key = unique()

    async def conversation(stalling: SeveringProxy, tool: Any) -> None:
        async with talking(worker, tool, calls("hold", {"key": key}, "c1"), close_s=0.2) as talk:
            begun = await talk.until("tool_update", "tool_execution")
            await heard(worker, key)
            stalling.stall_at(b"")
            await talk.session.close()
            about_close = [text for text in caplog.messages if "closed realtime session" in text]
            assert [text.partition(": ")[2] for text in about_close] == ["call c1 of hold"]
            stalling.go_on()  # the cancel arrives all the same
            assert await outcome(capsule, begun.data["execution"]) == Outcome.CANCELLED
            assert await talk.stored_output() == UNCERTAIN

    with SeveringProxy(server.port) as stalling:
        app = producer(stalling.url, worker.queue)
        try:
            Capsule(app)
            talk(conversation(stalling, task_tool(declare_tasks(app).hold)))
        finally:
            close(app)
