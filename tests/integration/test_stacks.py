"""Stacks of running code: on request, while the GIL is held, and of a silent child."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from capsule_tasks.protocol.messages import ErrorKind, Heartbeat
from capsule_tasks.sessions import Session
from capsule_tasks.sessions.info import Health
from capsule_tasks.settings import (
    ChildSettings,
    DiagnosticSettings,
    SessionConfig,
    TimeoutSettings,
)
from tests.sessions import HANG_S, GilHold, Watched, eventually

SECRET = "hunter2-must-not-travel"
CODE = f"""
import asyncio, itertools, os, threading, time
password = '{SECRET}'
def outer(secret='{SECRET}'):
    local = secret * 2
    return middle(local)
def middle(argument):
    return inner({{argument: argument}})
def inner(mapping):
    print('at work')
    time.sleep(3600)
async def outer_task(secret='{SECRET}'):
    return await inner_task(secret)
async def inner_task(secret):
    print('at work')
    await asyncio.Event().wait()
async def blocks():
    inner('{SECRET}')
def hold(secret='{SECRET}'):
    sum(itertools.chain(map(os.write, [1], [b'at work']), range(10**15)))
"""


def patient(**timeouts: Any) -> Session:
    """One that waits for its child's answer, however busy the machine is."""
    settings = {"stack_s": HANG_S, "grace_s": HANG_S, "shutdown_s": 0.1} | timeouts
    return Session(SessionConfig(warmup=CODE, timeouts=TimeoutSettings(**settings)))


def functions(stack: str) -> list[str]:
    return [line.rpartition(" in ")[2] for line in stack.splitlines() if ", in " in line]


async def stack_of(session: Session, source: str) -> tuple[Watched, str]:
    watched = Watched(session, source)
    await watched.until_output("at work")
    return watched, await session.stack(watched.execution_id)


async def test_the_stack_of_a_running_function() -> None:
    async with patient() as session:
        watched, stack = await stack_of(session, "outer()")
        assert f"of execution {watched.execution_id}" in stack
        assert functions(stack)[-4:] == ["<module>", "outer", "middle", "inner"]
        assert '"<warmup>", line 11, in inner' in stack
        assert "capsule_tasks" not in stack
        assert SECRET not in stack
        await session.cancel(watched.execution_id)


async def test_the_stacks_of_one_coroutine_and_of_all() -> None:
    async with patient() as session:
        first, stack = await stack_of(session, "await outer_task()")
        assert functions(stack) == ["<module>", "outer_task", "inner_task", "Event.wait"]
        second, _ = await stack_of(session, "await inner_task('x')")
        stack = await session.stack(second.execution_id)
        assert functions(stack) == ["<module>", "inner_task", "Event.wait"]
        everything = await session.stack()
        for watched in (first, second):
            assert f"of execution {watched.execution_id}" in everything
        assert "thread MainThread" in everything
        assert SECRET not in everything
        assert "capsule_tasks/child" not in everything


async def test_the_stack_of_a_coroutine_that_blocks_the_loop_shows_the_blocking_function() -> None:
    async with patient() as session:
        watched, stack = await stack_of(session, "await blocks()")
        assert "blocks" in functions(stack)
        assert "inner" in functions(stack)
        await session.cancel(watched.execution_id)


async def test_the_stacks_of_threads() -> None:
    async with patient() as session:
        source = "t = threading.Thread(target=outer, name='digger')\nt.daemon = True\nt.start()\n"
        watched, stack = await stack_of(session, source + "threading.Event().wait()")
        assert "thread digger" in stack
        assert "thread MainThread" in stack
        assert stack.count("thread ") == 2, "those of the session itself are not shown"
        assert {"outer", "inner", "Event.wait"} <= set(functions(stack))
        assert SECRET not in stack
        await session.cancel(watched.execution_id)


async def test_the_stacks_of_an_idle_session_and_of_an_unknown_execution() -> None:
    async with patient() as session:
        assert "thread MainThread" in await session.stack()
        assert await session.stack("unknown") == ""


async def test_while_the_gil_is_held() -> None:
    async with patient(stack_s=0.5) as session:
        watched, stack = await stack_of(session, "hold()")
        assert "line 20" in stack  # from the control thread, if it was asked a moment earlier
        assert "in hold" in stack
        assert SECRET not in stack
        assert "capsule_tasks/child" not in stack
        # Callers at the same time share one dump, and each gets all of it.
        stacks = await asyncio.gather(*(session.stack() for _ in range(5)))
        assert all("in hold" in one and "in <module>" in one for one in stacks)
        assert await session.cancel(watched.execution_id, grace_s=0.05) == "killed"
        terminal = await watched.ended()
        assert '"<warmup>", line 20 in hold' in terminal.stack
        assert SECRET not in terminal.stack


async def test_a_deep_recursion_has_a_stack_of_bounded_size() -> None:
    async with patient() as session:
        source = "def dive(n):\n    dive(n + 1) if n < 900 else inner(n)\ndive(0)"
        watched, stack = await stack_of(session, source)
        assert functions(stack)[-2:] == ["dive", "inner"]
        assert len(stack) < 100_000
        await session.cancel(watched.execution_id)


async def test_a_forced_kill_shows_where_a_stubborn_coroutine_was() -> None:
    async with patient() as session:
        watched = Watched(
            session,
            "async def deaf():\n"
            "    while True:\n"
            "        try:\n"
            "            await inner_task(0)\n"
            "        except asyncio.CancelledError:\n"
            "            pass\n"
            "await deaf()",
        )
        await watched.until_output("at work")
        assert await session.cancel(watched.execution_id, grace_s=0.05) == "killed"
        terminal = await watched.ended()
        assert functions(terminal.stack) == ["<module>", "deaf", "inner_task", "Event.wait"]


def watchful(unresponsive_s: float = 1.0) -> SessionConfig:
    return SessionConfig(
        warmup=CODE,
        child=ChildSettings(diagnostics=DiagnosticSettings(heartbeat_interval_s=0.02)),
        timeouts=TimeoutSettings(unresponsive_s=unresponsive_s, stack_s=0.5, shutdown_s=0.1),
    )


class Reports:
    """The health of its child as a session reports it."""

    def __init__(self, session: Session) -> None:
        self.all: list[Health] = []
        session.add_health_listener(self.all.append)

    async def until(self, *, unresponsive: bool, stack: str = "") -> Health:
        def is_reported() -> bool:
            last = self.all[-1]
            return last.unresponsive is unresponsive and stack in last.stack

        await eventually(lambda: self.all and is_reported())
        return self.all[-1]


async def stop_process(pid: int) -> None:
    """SIGSTOP, and wait until it has reached every thread."""
    os.kill(pid, signal.SIGSTOP)

    def states() -> set[str]:
        stats = (path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat"))
        return {stat.rpartition(")")[2].split()[0] for stat in stats}

    await eventually(lambda: states() == {"T"})


async def test_a_child_that_holds_the_gil_is_reported_unresponsive_and_lives_on() -> None:
    async with Session(watchful()) as session:
        reports = Reports(session)
        watched = Watched(session, "hold()")
        await watched.until_output("at work")
        health = await reports.until(unresponsive=True, stack="in hold")
        assert health == session.info.health
        assert health.process_state in ("R", "S")
        assert health.cpu_s > 0
        assert SECRET not in health.stack
        assert session.is_alive
        assert session.info.running == (watched.execution_id,)
        assert await session.cancel(watched.execution_id, grace_s=0.05) == "killed"
        assert (await watched.ended()).kind == ErrorKind.KILLED
        await session.run("1")
        assert session.info.health == Health()


async def test_a_call_that_gives_the_gil_back_ends_well_and_the_child_responds_again(
    gil_hold: GilHold,
) -> None:
    async with Session(watchful()) as session:
        reports = Reports(session)
        watched = Watched(session, gil_hold.source)
        await gil_hold.until_held()
        await reports.until(unresponsive=True, stack='"<cell 2>", line 8')
        gil_hold.let_go()
        assert (await watched.ended()).value is True
        assert (await reports.until(unresponsive=False)) == Health() == session.info.health
        assert session.info.restarts == 0


async def test_a_stopped_child_is_reported_and_recovers_when_it_is_continued() -> None:
    async with Session(watchful()) as session:
        reports = Reports(session)
        pid = session.info.pid
        assert pid is not None
        await stop_process(pid)
        try:
            health = await reports.until(unresponsive=True)
            assert health.process_state == "T"
            assert health.stack == ""
            waiting = Watched(session, "40 + 2")
        finally:
            os.kill(pid, signal.SIGCONT)
        assert (await waiting.ended()).value == 42
        assert (await reports.until(unresponsive=False)) == Health()
        assert (session.info.pid, session.info.restarts) == (pid, 0)


async def test_a_stopped_child_whose_execution_is_cancelled_is_replaced() -> None:
    async with Session(watchful()) as session:
        pid = session.info.pid
        assert pid is not None
        await stop_process(pid)
        watched = Watched(session, "1")
        await eventually(lambda: session.info.running)
        assert await session.cancel(watched.execution_id, grace_s=0.05) == "killed"
        assert (await watched.ended()).kind == ErrorKind.KILLED
        assert (await session.run("40 + 2")).value == 42
        assert session.info.pid != pid


async def test_heartbeats_report_running_executions_even_from_a_busy_child() -> None:
    async with Session(watchful(unresponsive_s=HANG_S)) as session:
        seen: list[Heartbeat] = []
        session.add_message_interceptor(
            lambda message: seen.append(message) if isinstance(message, Heartbeat) else None
        )
        watched = Watched(session, "kept = 1\nprint('at work')\nwhile True: pass")
        await watched.until_output("at work")
        waiting = Watched(session, "1", on_busy="wait")
        await eventually(lambda: waiting.messages)
        seen.clear()
        await eventually(lambda: len(seen) > 3)
        last = session.info.last_heartbeat
        assert last is not None
        assert last.running == (watched.execution_id,)
        assert last.waiting == 1
        assert last.rss_bytes > 1_000_000
        assert last.namespace_size > 5
        assert seen[-1].cpu_s > seen[0].cpu_s
        assert not session.info.health.unresponsive
        await session.cancel(watched.execution_id, grace_s=HANG_S)
        assert (await waiting.ended()).value == 1
        assert session.info.last_heartbeat_at is not None


@pytest.mark.parametrize("busy", [False, True])
async def test_asking_does_not_disturb_running_code(busy: bool) -> None:
    async with patient() as session:
        source = "[time.sleep(0.0005) for _ in range(200)]" if busy else "sum(range(100_000))"
        watched = Watched(session, f"{source}\n'undisturbed'")
        while not watched._task.done():
            await session.stack()
        assert (await watched.ended()).value == "undisturbed"
