"""One blocking execution at a time, many coroutines at once, and each has its own output only."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from capsule_tasks.protocol.messages import Ack, Error, ErrorKind, InputRequest, Message, Result
from capsule_tasks.sessions import Session
from capsule_tasks.settings import ExecutorSettings
from tests.sessions import HANG_S, Watched, child_config, collect, end_of, eventually, text

SLEEP = "import time\nprint('there', flush=True)\ntime.sleep(3600)"


async def stopped(session: Session, *executions: Watched) -> None:
    for execution in executions:
        await session.cancel(execution.execution_id, grace_s=HANG_S)
        await execution.ended()


def is_busy(terminal: Any) -> bool:
    return isinstance(terminal, Error) and terminal.kind == ErrorKind.BUSY


# --- blocking code -------------------------------------------------------------------------------


async def test_a_second_blocking_execution_is_answered_busy(session: Session) -> None:
    first = Watched(session, SLEEP)
    await first.until_output("there")
    async with asyncio.timeout(HANG_S):
        error = await end_of(session, "print('mixed in')")
    assert is_busy(error)
    assert error.type == "SessionBusy"
    assert first.execution_id in error.message
    await stopped(session, first)
    assert text(first.messages) == "there\n"


async def test_an_execution_that_waits_runs_when_the_first_has_ended(session: Session) -> None:
    first = Watched(session, "x = 1\n" + SLEEP)
    await first.until_output("there")
    second = Watched(session, "print(x); x = 2", on_busy="wait")
    third = Watched(session, "print(x)", on_busy="wait")
    await third.until(Ack)
    assert [type(m) for m in second.messages] == [Ack]
    await stopped(session, first)
    for execution, wanted in ((second, "1\n"), (third, "2\n")):
        assert isinstance(await execution.ended(), Result)
        assert text(execution.messages) == wanted


async def test_waiting_executions_run_in_the_order_of_their_arrival(session: Session) -> None:
    await session.run("order = []")
    executions = [
        Watched(session, f"order.append({i})\nprint({i})", on_busy="wait") for i in range(50)
    ]
    for i, execution in enumerate(executions):
        assert isinstance(await execution.ended(), Result)
        assert text(execution.messages) == f"{i}\n"
    assert (await session.run("order")).value == list(range(50))


async def test_only_one_of_two_executions_sent_in_one_write_runs(session: Session) -> None:
    """Whether the second is refused before or after its Ack, it never runs beside the first."""
    await session.run("ran = []")
    source = "ran.append(1)\nprint('a')\ninput()\nprint('b')"
    for _ in range(20):
        pair = Watched(session, source), Watched(session, source)
        executions = {asyncio.ensure_future(one.ended()): one for one in pair}
        (refused,), (running,) = await asyncio.wait(executions, return_when="FIRST_COMPLETED")
        assert is_busy(refused.result())
        question = await executions[running].until(InputRequest)
        await session.input_response("", request_id=question.id, execution_id=question.execution_id)
        assert isinstance(await running, Result)
        assert text(executions[running].messages) == "a\nb\n"
    assert (await session.run("len(ran)")).value == 20


async def test_more_than_may_wait_are_answered_busy() -> None:
    config = child_config(executor=ExecutorSettings(max_waiting=2))
    async with Session(config) as session:
        first = Watched(session, SLEEP)
        await first.until_output("there")
        waiting = [Watched(session, "1", on_busy="wait") for _ in range(2)]
        for execution in waiting:
            await execution.until(Ack)
        error = await end_of(session, "1", on_busy="wait")
        assert is_busy(error)
        assert "2 executions are waiting already" in error.message
        await stopped(session, first)
        for execution in waiting:
            assert isinstance(await execution.ended(), Result)


async def test_an_id_that_is_running_is_refused(session: Session) -> None:
    first = Watched(session, SLEEP, execution_id="twice")
    await first.until_output("there")
    with pytest.raises(ValueError, match="'twice' is running already"):
        await collect(session, "1", execution_id="twice")
    await stopped(session, first)
    assert (await session.run("1", execution_id="twice")).value == 1


# --- coroutines ----------------------------------------------------------------------------------


async def test_coroutines_run_at_once(session: Session) -> None:
    """Each of them waits until all are there: one by one they would wait for ever."""
    await session.run("import asyncio\nthere, all_there = [], asyncio.Event()")
    executions = [
        Watched(
            session,
            f"there.append({i})\nif len(there) == 100: all_there.set()\n"
            f"await all_there.wait()\nprint({i})\n{i}",
        )
        for i in range(100)
    ]
    for i, execution in enumerate(executions):
        assert (await execution.ended()).value == i
        assert text(execution.messages) == f"{i}\n"


async def test_more_coroutines_than_allowed_are_answered_busy() -> None:
    async with Session(child_config(executor=ExecutorSettings(async_limit=2))) as session:
        running = [
            Watched(session, "import asyncio\nprint('there')\nawait asyncio.sleep(3600)")
            for _ in range(2)
        ]
        for execution in running:
            await execution.until_output("there")
        error = await end_of(session, "await asyncio.sleep(0)")
        assert is_busy(error)
        assert "2 coroutines" in error.message
        await stopped(session, *running)


async def test_a_coroutine_beyond_the_limit_waits_if_it_may() -> None:
    """One that may not wait is refused at once, although others wait in the queue."""
    source = "import asyncio\nprint('there')\nawait asyncio.sleep(3600)"
    async with Session(child_config(executor=ExecutorSettings(async_limit=2))) as session:
        running = [Watched(session, source) for _ in range(2)]
        for execution in running:
            await execution.until_output("there")
        waiting = [
            Watched(session, f"await asyncio.sleep(0, {n})", on_busy="wait") for n in range(3)
        ]
        for execution in waiting:
            await execution.until(Ack)
        for refused in ("await asyncio.sleep(0)", "1"):
            error = await end_of(session, refused)
            assert is_busy(error)
            assert "2 coroutines are running already" in error.message
        assert session.info.running == tuple(e.execution_id for e in running + waiting)
        await stopped(session, running.pop())
        for n, execution in enumerate(waiting):
            assert (await execution.ended()).value == n
        await stopped(session, *running)


async def test_an_execution_that_waited_for_a_cancelled_one_begins_at_once(
    session: Session,
) -> None:
    """Blocking code that waits for coroutines holds up the coroutine behind it."""
    running = Watched(session, "import asyncio\nprint('there')\nawait asyncio.sleep(3600)")
    await running.until_output("there")
    blocking = Watched(session, "1", on_busy="wait")
    await blocking.until(Ack)
    behind = Watched(session, "await asyncio.sleep(0, 'began')", on_busy="wait")
    await behind.until(Ack)
    assert await session.cancel(blocking.execution_id) == "interrupted"
    assert (await behind.ended()).value == "began"
    await stopped(session, running)


async def test_blocking_code_while_coroutines_run_is_answered_busy_or_waits(
    session: Session,
) -> None:
    running = Watched(session, "import asyncio\nprint('there')\nawait asyncio.sleep(3600)")
    await running.until_output("there")
    assert is_busy(await end_of(session, "1"))
    waiting = Watched(session, "'at last'", on_busy="wait")
    await waiting.until(Ack)
    await stopped(session, running)
    assert (await waiting.ended()).value == "at last"


async def test_a_coroutine_while_blocking_code_runs_is_answered_busy_or_waits(
    session: Session,
) -> None:
    first = Watched(session, SLEEP)
    await first.until_output("there")
    assert is_busy(await end_of(session, "import asyncio\nawait asyncio.sleep(0)"))
    waiting = Watched(session, "import asyncio\nawait asyncio.sleep(0, 'at last')", on_busy="wait")
    await waiting.until(Ack)
    await stopped(session, first)
    assert (await waiting.ended()).value == "at last"


async def test_tasks_the_user_left_running_go_on_between_executions(session: Session) -> None:
    await session.run(
        "import asyncio\n"
        "ticks = 0\n"
        "async def tick():\n"
        "    global ticks\n"
        "    while True:\n"
        "        ticks += 1\n"
        "        await asyncio.sleep(0.001)\n"
        "task = asyncio.get_running_loop().create_task(tick())\n"
        "await asyncio.sleep(0)"
    )
    seen = (await session.run("ticks")).value
    async with asyncio.timeout(HANG_S):
        while (await session.run("ticks")).value < seen + 5:
            pass
    await session.run("await asyncio.sleep(0.01)\ntask.cancel()")


async def test_a_background_task_that_fails_or_exits_harms_no_execution(session: Session) -> None:
    await session.run(
        "import asyncio\n"
        "async def fail(error): raise error\n"
        "tasks = [asyncio.ensure_future(fail(e)) for e in (ValueError(), SystemExit(), "
        "KeyboardInterrupt())]\n"
        "await asyncio.sleep(0)"
    )
    assert (await session.run("await asyncio.sleep(0, 'fine')")).value == "fine"
    assert (await session.run("[type(t.exception()).__name__ for t in tasks]")).value == [
        "ValueError",
        "SystemExit",
        "KeyboardInterrupt",
    ]


async def test_async_def_and_async_for_and_with_work_at_top_level(session: Session) -> None:
    done = await session.run(
        "import asyncio, contextlib\n"
        "async def numbers():\n"
        "    for i in range(3): yield i\n"
        "@contextlib.asynccontextmanager\n"
        "async def inside():\n"
        "    print('in'); yield 5; print('out')\n"
        "seen = [i async for i in numbers()]\n"
        "async for i in numbers(): seen.append(i)\n"
        "async with inside() as five: seen.append(five)\n"
        "seen"
    )
    assert (done.value, done.stdout) == ([0, 1, 2, 0, 1, 2, 5], "in\nout\n")


# --- attribution ---------------------------------------------------------------------------------


async def test_output_of_coroutines_that_take_turns_is_told_apart(session: Session) -> None:
    await session.run("import asyncio")
    executions = [
        Watched(
            session,
            f"for i in range(100):\n    print('{name}')\n    await asyncio.sleep(0)",
        )
        for name in "abcdefgh"
    ]
    for name, execution in zip("abcdefgh", executions, strict=True):
        await execution.ended()
        assert text(execution.messages) == f"{name}\n" * 100


async def test_threads_and_tasks_write_for_the_execution_that_started_them(
    session: Session,
) -> None:
    await session.run(
        "import asyncio, threading\n"
        "def in_thread(name):\n"
        "    print(name, 'thread')\n"
        "    nested = threading.Thread(target=print, args=(name, 'nested thread'))\n"
        "    nested.start(); nested.join()\n"
        "async def in_task(name):\n"
        "    await asyncio.sleep(0)\n"
        "    print(name, 'task')\n"
        "async def all_of(name):\n"
        "    thread = threading.Thread(target=in_thread, args=(name,))\n"
        "    thread.start()\n"
        "    task = asyncio.create_task(in_task(name))\n"
        "    await asyncio.to_thread(print, name, 'to_thread')\n"
        "    await task\n"
        "    await asyncio.to_thread(thread.join)"
    )
    executions = [Watched(session, f"await all_of({i})") for i in range(10)]
    for i, execution in enumerate(executions):
        assert isinstance(await execution.ended(), Result)
        assert sorted(text(execution.messages).splitlines()) == [
            f"{i} {writer}" for writer in ("nested thread", "task", "thread", "to_thread")
        ]


async def test_context_variables_are_each_executions_own(session: Session) -> None:
    await session.run("import asyncio, contextvars\nvar = contextvars.ContextVar('v', default='-')")
    executions = [
        Watched(session, f"var.set({i})\nawait asyncio.sleep(0.001)\nvar.get()") for i in range(10)
    ]
    for i, execution in enumerate(executions):
        assert (await execution.ended()).value == i
    assert (await session.run("await asyncio.sleep(0)\nvar.get()")).value == "-"


async def test_context_variables_of_blocking_code_persist(session: Session) -> None:
    await session.run("import contextvars\nvar = contextvars.ContextVar('v', default='-')")
    await session.run("token = var.set('kept')")
    assert (await session.run("var.get()")).value == "kept"
    assert (await session.run("import asyncio\nawait asyncio.sleep(0)\nvar.get()")).value == "kept"
    assert (await session.run("var.reset(token)\nvar.get()")).value == "-"


# --- several sessions ----------------------------------------------------------------------------


async def test_parallel_sessions_get_only_their_own_messages() -> None:
    async def work(i: int) -> None:
        async with Session() as session:
            await session.run(f"me = {i}")
            for round_ in range(10):
                messages: list[Message] = await collect(
                    session, f"import os\nos.system('echo {i}')\nprint(me, {round_})\nme"
                )
                assert sorted(text(messages).split()) == sorted([str(i), str(i), str(round_)])
                assert messages[-1].value == i  # type: ignore[attr-defined]

    async with asyncio.timeout(HANG_S):
        await asyncio.gather(*(work(i) for i in range(6)))


async def test_sessions_on_loops_of_their_own_threads_work() -> None:
    def work(i: int) -> object:
        async def run() -> object:
            async with Session() as session:
                return (await session.run(f"{i} * 2")).value

        return asyncio.run(run())

    async with asyncio.timeout(HANG_S):
        values = await asyncio.gather(*(asyncio.to_thread(work, i) for i in range(4)))
    assert values == [0, 2, 4, 6]


async def test_a_consumer_that_leaves_stops_its_own_execution_only(session: Session) -> None:
    await session.run("import asyncio\nleft = []")
    other = Watched(session, "print('there')\nawait asyncio.sleep(3600)")
    await other.until_output("there")
    source = "try:\n    print('in')\n    await asyncio.sleep(3600)\nfinally: left.append('out')"
    async with contextlib.aclosing(session.execute(source)) as messages:
        async for message in messages:
            if not isinstance(message, Ack):
                break
    await eventually(lambda: session.info.running == (other.execution_id,))
    assert (await session.run("await asyncio.sleep(0)\nleft")).value == ["out"]
    await stopped(session, other)
