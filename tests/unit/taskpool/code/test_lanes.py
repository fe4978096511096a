"""A lane of code: how many sessions it has, and who ends its executions. The sessions are fake."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from capsule_tasks.executions.calls import CodeCall
from capsule_tasks.executions.execution import Execution
from capsule_tasks.executions.lifecycle import Lifecycle
from capsule_tasks.executions.origin import Origin
from capsule_tasks.protocol.messages import Code, Error, ErrorKind, Result
from capsule_tasks.sessions.pool import session_pool
from capsule_tasks.sessions.pool.session_pool import ProfilePool
from capsule_tasks.settings import CodeProfileSettings, SessionConfig
from capsule_tasks.taskpool.code.lanes import CodeLane
from tests.sessions import HANG_S
from tests.unit.executions.dispatching import FakeSession, Listener, lost


class Ends:
    """Notes what the tracer would be told."""

    def __init__(self) -> None:
        self.noted: list[tuple[str, object]] = []

    def end(self, execution: Execution, end: object) -> None:
        self.noted.append((execution.call.task_id, type(end)))

    def refuse(self, execution: Execution, reason: str) -> None:
        self.noted.append((execution.call.task_id, reason))


class BrokenSession(FakeSession):
    async def start(self) -> None:
        raise OSError("no room")


class Ground:
    def __init__(self, warm: int) -> None:
        profile = CodeProfileSettings().profile(SessionConfig())
        pool = ProfilePool("code:sandbox", profile, None, None)
        self.listener, self.ends = Listener(), Ends()
        supervisor: Any = self.listener
        ends: Any = self.ends
        self.lane = CodeLane("sandbox", pool, warm, ends, supervisor, {})
        self.supervisor = supervisor

    def send(self, *ids: str) -> list[Execution]:
        sent = [code(one) for one in ids]
        for execution in sent:
            self.lane.enqueue(execution)
        return sent

    def session_of(self, execution: Execution) -> Any:
        assert execution.child is not None
        return execution.child.session

    async def has(self, *, running: int, warm: int) -> None:
        """Wait until so many sessions run code, and so many are ready for more."""

        def counted() -> tuple[int, int]:
            children = [c for c in self.lane.children.values() if not c.slot.retire_reason]
            return sum(bool(c.sent) for c in self.lane.children.values()), len(children)

        async with asyncio.timeout(HANG_S):
            while counted() != (running, warm):
                await asyncio.sleep(0)


def code(task_id: str) -> Execution:
    call = CodeCall(name="capsule.execute", task_id=task_id, source=f"run({task_id})", timeout_s=2)
    return Execution(call, Lifecycle(Origin(execution_id=task_id, task="capsule.execute")))


@asynccontextmanager
async def ground(
    warm: int = 1, session: Callable[..., FakeSession] = FakeSession
) -> AsyncIterator[Ground]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session_pool, "Session", session)
        patch.setattr(session_pool.TemplateSpawner, "start", no_template)
        made = Ground(warm)
        yield made
        await made.lane.stop()


async def no_template(_: object) -> None: ...


async def test_no_session_is_started_before_the_first_code_and_one_is_ready_from_then_on() -> None:
    async with ground() as here:
        assert here.lane.size == 0
        (one,) = here.send("1")
        await here.has(running=1, warm=1)
        session = here.session_of(one)
        assert session.payloads == [(Code(source="run(1)"), 2)]
        session.end("1", Result(execution_id="1"))
        await here.has(running=0, warm=1)
        assert here.ends.noted == [("1", Result)]
        async with asyncio.timeout(HANG_S):
            while session.is_alive:  # it is used once
                await asyncio.sleep(0)


async def test_each_execution_has_a_session_and_those_to_spare_stay_as_many() -> None:
    async with ground(warm=2) as here:
        sent = here.send("1", "2", "3")
        await here.has(running=3, warm=2)
        assert len({id(here.session_of(one)) for one in sent}) == 3
        for one in sent:
            here.session_of(one).end(one.call.task_id, Result(execution_id=one.call.task_id))
        await here.has(running=0, warm=2)


async def test_without_any_to_spare_sessions_start_with_the_code() -> None:
    async with ground(warm=0) as here:
        (one,) = here.send("1")
        await here.has(running=1, warm=0)
        here.session_of(one).end("1", Result(execution_id="1"))
        await here.has(running=0, warm=0)
        here.send("2")
        await here.has(running=1, warm=0)


async def test_code_that_is_taken_back_leaves_no_session_too_many() -> None:
    async with ground(warm=1) as here:
        one, two = here.send("1", "2")
        assert here.lane.remove(two)
        assert not here.lane.remove(two)
        await here.has(running=1, warm=1)
        assert one.child is not None
        assert here.lane.size == 2


@pytest.mark.parametrize(
    ("kind", "is_of_the_code"),
    [
        (ErrorKind.RAISED, True),
        (ErrorKind.LIMIT, True),
        (ErrorKind.TIMEOUT, True),
        (ErrorKind.CANCELLED, False),
        (ErrorKind.KILLED, False),
        (ErrorKind.LOST, False),
        (ErrorKind.TOO_LARGE, False),
    ],
)
async def test_the_tracer_ends_code_that_ended_by_itself(
    kind: ErrorKind, is_of_the_code: bool
) -> None:
    async with ground() as here:
        (one,) = here.send("1")
        await here.has(running=1, warm=1)
        here.session_of(one).end("1", lost("1", kind))
        assert here.ends.noted == ([("1", Error)] if is_of_the_code else [])
        assert (here.listener.of(one)[-1] == "finished") is not is_of_the_code
        await here.has(running=0, warm=1)


async def test_code_whose_sessions_do_not_start_is_refused_with_the_reason() -> None:
    async with ground(session=BrokenSession) as here:
        here.send("1", "2")
        async with asyncio.timeout(HANG_S):
            while len(here.ends.noted) < 2:
                await asyncio.sleep(0)
        reason = "no session of profile 'sandbox' starts: no room"
        assert here.ends.noted == [("1", reason), ("2", reason)]
        assert not here.lane.waiting
