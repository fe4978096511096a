"""Cancelling blocking code: stopped by the first signal, or killed with all it started."""

from __future__ import annotations

import asyncio
import textwrap
import time

import pytest

from capsule_tasks.errors import SessionStateError
from capsule_tasks.protocol.messages import Error, ErrorKind, InputRequest, Result
from capsule_tasks.sessions import Session, SessionState
from capsule_tasks.settings import SessionConfig, TimeoutSettings
from capsule_tasks.system.family import descendants
from tests.sessions import HANG_S, GilHold, Watched, collect, eventually, text, until_exited

OBEDIENT = {
    "a loop on one line": "while True: pass",
    "a loop over lines": "while True:\n    x = 1",
    "a recursion that hits the limit again and again": """
        def dive():
            dive()
        while True:
            try:
                dive()
            except RecursionError:
                pass
        """,
    "a recursion that never returns": """
        def dive(depth):
            for _ in range(1 if depth > 500 else 2):
                dive(depth + 1) if depth < 900 else time.sleep(0.001)
        while True:
            dive(0)
        """,
    "a sleep": "time.sleep(3600)",
    "a read from a socket": "near, far = socket.socketpair()\nnear.recv(1)",
    "a wait for an event": "threading.Event().wait()",
    "a wait for a thread": """
        thread = threading.Thread(target=time.sleep, args=(3600,), daemon=True)
        thread.start()
        thread.join()
        """,
    "a flood of prints": "while True: print('x')",
    "a flood of flushed prints": "while True: print('x', flush=True)",
    "a flood of bytes": "while True: sys.stdout.buffer.write(b'x' * 1000)",
    "a flood of progress": "while True: progress(1)",
    "one process after another": "while True: subprocess.run(['true'])",
    "one thread after another": "while True: threading.Thread(target=int).start()",
}

STUBBORN = {
    "a loop that swallows everything": """
        has_reported = 0
        while True:
            try:
                while True:
                    has_reported = has_reported or os.write(1, b'stuck')
            except BaseException:
                pass
        """,
    "a C call that holds the GIL": "hold_gil()",
    "code that blocks the signal": """
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        os.write(1, b'stuck')
        time.sleep(3600)
        """,
}
SWALLOWING = STUBBORN["a loop that swallows everything"]

PRELUDE = """
import os, signal, socket, subprocess, sys, threading, time
from capsule_tasks import progress
"""


def guarded(snippet: str) -> str:
    """A cell that keeps a name, announces that it is at work, and has something to clean up."""
    return (
        PRELUDE
        + "kept = 41\ndef work():\n    os.write(1, b'at work\\n')\n"
        + textwrap.indent(textwrap.dedent(snippet), "    ")
        + "\ntry:\n    work()\nfinally:\n    print('finally ran')\n"
    )


async def assert_stopped_in_order(session: Session, watched: Watched, pid: int | None) -> None:
    terminal = await watched.ended()
    assert isinstance(terminal, Error)
    assert terminal.kind == ErrorKind.CANCELLED
    assert terminal.type == "ExecutionCancelled"
    assert text(watched.messages).endswith("finally ran\n")
    assert (session.info.pid, session.info.restarts) == (pid, 0)
    assert (await session.run("kept + 1")).value == 42


@pytest.mark.parametrize("snippet", OBEDIENT.values(), ids=OBEDIENT.keys())
async def test_the_first_signal_stops_it_and_the_namespace_is_kept(
    session: Session, snippet: str
) -> None:
    pid = session.info.pid
    watched = Watched(session, guarded(snippet))
    await watched.until_output("at work")
    assert await session.cancel(watched.execution_id, grace_s=5.0) == "interrupted"
    await assert_stopped_in_order(session, watched, pid)


async def test_a_bare_endless_loop_is_stopped(session: Session) -> None:
    watched = Watched(session, "while True: pass")
    await eventually(lambda: watched.messages)
    assert await session.cancel(watched.execution_id, grace_s=HANG_S) == "interrupted"
    assert (await watched.ended()).kind == ErrorKind.CANCELLED


async def test_a_subprocess_that_is_waited_for_ends_too(session: Session) -> None:
    pid = session.info.pid
    assert pid is not None
    for turn in range(20):
        source = guarded("subprocess.run(['sleep', '3600'])")
        watched = Watched(session, source, execution_id=f"turn-{turn}")
        await watched.until_output("at work")
        (sleep,) = await eventually(lambda: descendants(pid))
        assert await session.cancel(watched.execution_id, grace_s=HANG_S) == "interrupted"
        await until_exited(sleep)
        await assert_stopped_in_order(session, watched, pid)
        assert descendants(pid) == []


async def test_input_without_an_answer_is_stopped(session: Session) -> None:
    pid = session.info.pid
    watched = Watched(session, guarded("input('name? ')"))
    await watched.until(InputRequest)
    assert await session.cancel(watched.execution_id, grace_s=HANG_S) == "interrupted"
    await assert_stopped_in_order(session, watched, pid)
    assert session.info.inputs.pending == 0


async def test_output_that_is_not_read_is_stopped(session: Session) -> None:
    messages = session.execute("while True:\n    print('x' * 1000)", execution_id="flood")
    await anext(messages)
    await eventually(lambda: session.info.queues.buffered_bytes > 1_000_000)
    assert await session.cancel("flood", grace_s=HANG_S) == "interrupted"
    last = [message async for message in messages][-1]
    assert isinstance(last, Error)
    assert last.kind == ErrorKind.CANCELLED
    assert (await session.run("40 + 2")).value == 42


async def test_a_result_whose_repr_never_ends_is_stopped(session: Session) -> None:
    source = (
        "class Endless:\n def __repr__(self):\n  print('in repr')\n  while True: pass\nEndless()"
    )
    watched = Watched(session, source)
    await watched.until_output("in repr")
    assert await session.cancel(watched.execution_id, grace_s=HANG_S) == "interrupted"
    assert (await watched.ended()).kind == ErrorKind.CANCELLED


async def test_the_traceback_shows_where_the_code_was(session: Session) -> None:
    watched = Watched(session, guarded("time.sleep(3600)"))
    await watched.until_output("at work")
    while "line 7, in work" not in await session.stack(watched.execution_id):
        pass  # between its output and the sleep
    await session.cancel(watched.execution_id, grace_s=HANG_S)
    terminal = await watched.ended()
    assert "time.sleep(3600)" in terminal.traceback
    assert "in work" in terminal.traceback
    assert "capsule_tasks" not in terminal.traceback.replace("capsule_tasks.errors", "")


FAMILY = """
    plain = subprocess.Popen(['sleep', '3600'])
    own_session = subprocess.Popen(['sleep', '3600'], start_new_session=True)
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(writing, b'%d' % os.getpid())
            time.sleep(3600)
        os._exit(0)
    os.write(1, b'family %d %d %s;' % (plain.pid, own_session.pid, os.read(reading, 20)))
    """


@pytest.mark.parametrize("snippet", STUBBORN.values(), ids=STUBBORN.keys())
async def test_a_child_that_does_not_stop_is_killed_with_its_descendants_and_replaced(
    snippet: str, gil_hold: GilHold
) -> None:
    config = SessionConfig(warmup="warm = 1", timeouts=TimeoutSettings(stack_s=1.0))
    async with Session(config) as session:
        pid = session.info.pid
        snippet = textwrap.dedent(snippet)
        watched = Watched(session, gil_hold.definition + guarded(textwrap.dedent(FAMILY) + snippet))
        await watched.until_output("family")
        if snippet == "hold_gil()":
            await gil_hold.until_held()
        else:
            await watched.until_output("stuck")
        pids = [int(word) for word in text(watched.messages).partition(";")[0].split()[-3:]]
        begun = time.monotonic()
        assert await session.cancel(watched.execution_id, grace_s=0.2) == "killed"
        assert 0.2 <= time.monotonic() - begun < HANG_S
        terminal = await watched.ended()
        assert isinstance(terminal, Error)
        assert (terminal.kind, terminal.message) == (ErrorKind.KILLED, "cancelled (killed)")
        assert "in work" in terminal.stack
        warned = text(watched.messages, "stderr")  # from 3.12 on, of a fork beside our threads
        assert "Traceback" not in warned
        for descendant in pids:
            await until_exited(descendant)
        assert (await session.run("warm")).value == 1
        assert (await session.run("'kept' in globals()")).value is False
        assert session.info.pid not in (None, pid)
        assert (session.state, session.info.restarts) == (SessionState.READY, 1)


async def test_an_execute_right_behind_the_kill_waits_for_the_replacement(
    session: Session, gil_hold: GilHold
) -> None:
    watched = Watched(session, gil_hold.source)
    await gil_hold.until_held()

    async def go_on_at_once() -> Result | Error:
        await watched.ended()
        return (await collect(session, "6 * 7"))[-1]  # type: ignore[return-value]

    cancelled = session.cancel(watched.execution_id, grace_s=0.05)
    outcome, last = await asyncio.gather(cancelled, go_on_at_once())
    assert outcome == "killed"
    assert isinstance(last, Result)
    assert last.value == 42


async def test_without_replacement_a_killed_session_is_over() -> None:
    async with Session(SessionConfig(replace_killed=False)) as session:
        watched = Watched(session, guarded(SWALLOWING))
        await watched.until_output("stuck")
        assert await session.cancel(watched.execution_id, grace_s=0.05) == "killed"
        assert session.state is SessionState.TERMINATED
        with pytest.raises(SessionStateError, match="restart"):
            await collect(session, "1")


async def test_an_execution_waiting_behind_it_does_not_put_the_kill_off() -> None:
    """Nothing can finish while one execution holds the main thread: there is nothing to drain."""
    async with Session(SessionConfig(timeouts=TimeoutSettings(drain_s=3600))) as session:
        watched = Watched(session, guarded(SWALLOWING))
        await watched.until_output("stuck")
        waiting = Watched(session, "1", on_busy="wait")
        await eventually(lambda: waiting.messages)
        async with asyncio.timeout(HANG_S):
            assert await session.cancel(watched.execution_id, grace_s=0.05) == "killed"
        assert (await watched.ended()).kind == ErrorKind.KILLED
        assert (await waiting.ended()).kind == ErrorKind.LOST_WITH_NEIGHBOUR
