"""The dispatcher with real children of a Celery app, and no worker."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from capsule_tasks.executions.dispatcher import Dispatcher
from capsule_tasks.executions.execution import Execution
from capsule_tasks.executions.lifecycle import Lifecycle
from capsule_tasks.executions.origin import Origin
from capsule_tasks.protocol.messages import (
    Error,
    InputRequest,
    Message,
    Output,
    TaskCall,
    TaskResult,
    Terminal,
)
from capsule_tasks.sessions import SessionPool
from capsule_tasks.settings import (
    ChildSettings,
    PoolSettings,
    Profile,
    SessionConfig,
    TaskChildSettings,
)
from tests.sessions import HANG_S


class Work(Execution, eq=False):
    started: asyncio.Future[float] = msgspec.field(default_factory=asyncio.Future)
    spoke: asyncio.Future[Message] = msgspec.field(default_factory=asyncio.Future)
    over: asyncio.Future[tuple[Terminal, int | None]] = msgspec.field(
        default_factory=asyncio.Future
    )

    async def end(self) -> Terminal:
        async with asyncio.timeout(HANG_S):
            end, _ = await self.over
        return end


def new_work(name: str, task_id: str) -> Work:
    call = TaskCall(
        name=f"tests.integration.dispatch_app.{name}",
        task_id=task_id,
        body=b'[[], {}, {"callbacks": null, "errbacks": null, "chain": null, "chord": null}]',
        content_type="application/json",
        content_encoding="utf-8",
        request={"id": task_id, "task": name, "delivery_info": {}},
    )
    origin = Origin(execution_id=task_id, task=name, is_async=name.endswith("_async"))
    return Work(call, Lifecycle(origin))


class Listener:
    """Each future is set once: a second result would raise."""

    def feed(self, work: Execution, event: object, *args: float) -> None:
        assert isinstance(work, Work)
        # A child that is slow acknowledges what was assumed to have started.
        if event == Lifecycle.on_child_started and not work.started.done():
            work.started.set_result(args[0])

    def on_message(self, work: Execution, message: Message) -> None:
        assert isinstance(work, Work)
        if isinstance(message, (Output, InputRequest)) and not work.spoke.done():
            work.spoke.set_result(message)

    def finished(self, work: Execution, end: Terminal, exit_status: int | None) -> None:
        assert isinstance(work, Work)
        work.over.set_result((end, exit_status))


class Ground:
    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher
        self._ids = 0

    def begin(self, name: str) -> Work:
        self._ids += 1
        work = new_work(name, f"task-{self._ids}")
        work.lane = self.dispatcher.lanes["async" if work.life.origin.is_async else "blocking"]
        self.dispatcher.enqueue(work)
        return work

    async def held(self, name: str) -> Work:
        """A work that is at it."""
        work = self.begin(name)
        async with asyncio.timeout(HANG_S):
            await work.spoke
        return work


def profile(kind: Any, **changes: object) -> Profile:
    lane = TaskChildSettings(kind=kind, app="tests.integration.dispatch_app:app", hostname="here")
    settings = PoolSettings(min_idle=0, fresh=False, **changes)  # type: ignore[arg-type]
    config = SessionConfig(child=ChildSettings(tasks=lane))
    return Profile.app(settings, session=config, start="cold")


@asynccontextmanager
async def ground(
    blocking: int = 0, asynchronous: int = 0, **changes: object
) -> AsyncIterator[Ground]:
    profiles = {kind: profile(kind, **changes) for kind in ("blocking", "async")}
    async with asyncio.timeout(2 * HANG_S), SessionPool(profiles) as sessions:
        dispatcher = Dispatcher(sessions, Listener(), async_limit=10)
        dispatcher.resize("blocking", blocking)
        dispatcher.resize("async", asynchronous)
        yield Ground(dispatcher)


async def test_children_are_replaced_after_so_many_tasks_and_lose_none() -> None:
    async with ground(2, max_uses=2) as here:
        ends = [await work.end() for work in [here.begin("pid") for _ in range(6)]]
        pids = Counter(end.text for end in ends if isinstance(end, TaskResult))
        assert sum(pids.values()) == 6
        assert max(pids.values()) <= 2


async def test_a_crash_ends_one_task_and_its_successor_takes_the_next() -> None:
    async with ground(1) as here:
        crash, after = here.begin("crash"), here.begin("pid")
        async with asyncio.timeout(HANG_S):
            end, exit_status = await crash.over
        assert isinstance(end, Error)
        assert exit_status == -signal.SIGSEGV
        assert isinstance(await after.end(), TaskResult)
        assert here.dispatcher.lanes["blocking"].pool.info().lost_total == 1


async def test_one_of_many_coroutines_is_cancelled_and_the_others_go_with_their_child() -> None:
    async with ground(asynchronous=1) as here:
        one, two, three = [await here.held("hold_async") for _ in range(3)]
        assert len({work.child for work in (one, two, three)}) == 1
        here.dispatcher.cancel(one, HANG_S)
        await one.end()
        assert here.dispatcher.sent_executions() == [two, three]
        assert "hold_async" in (await here.dispatcher.stack(two) or "")
        here.dispatcher.signal(two, signal.SIGKILL, "a test")
        for work in (two, three):
            async with asyncio.timeout(HANG_S):
                assert (await work.over)[1] == -signal.SIGKILL


async def test_a_question_is_answered_or_its_input_ended() -> None:
    async with ground(1) as here:
        for answers in (True, False):
            work = await here.held("ask")
            question = work.spoke.result()
            if answers:
                await here.dispatcher.respond(work, question.id, "anna")
            else:
                await here.dispatcher.end_input(work, question.id)
            end = await work.end()
            assert isinstance(end, TaskResult)
            assert (end.text == "'anna'") if answers else end.failure.name == "EOFError"


@pytest.mark.parametrize(
    ("how", "name"), [("soft limit", "SoftTimeLimitExceeded"), ("interrupt", "KeyboardInterrupt")]
)
async def test_work_is_stopped_from_within(how: str, name: str) -> None:
    async with ground(1) as here:
        work = await here.held("hold")
        if how == "interrupt":
            await here.dispatcher.interrupt(work)
        else:
            assert here.dispatcher.soft_limit(work)
        end = await work.end()
        assert isinstance(end, TaskResult)
        assert end.failure is not None
        assert end.failure.name == name


async def test_the_work_that_a_stopping_pool_ends_is_finished_once() -> None:
    async with ground(1, 1) as here:
        works = [await here.held("hold"), await here.held("hold_async")]
    for work in works:
        assert isinstance(await work.end(), Error)
