"""Wrong values and wrong event loops are clear errors of the caller, before they do harm."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import signal
from collections.abc import Callable
from typing import Any

import pytest

from capsule_tasks.errors import PoolUnavailable, WrongEventLoop
from capsule_tasks.protocol.messages import InputRequest, Result
from capsule_tasks.sessions import Session, SessionPool
from tests.sessions import HANG_S

REFUSED: dict[str, Callable[[Any], Any]] = {
    "config": lambda session: Session({"child": 1}),
    "session_id": lambda session: Session(session_id=5),
    "session_id ": lambda session: Session(session_id="\ud800"),
    "spawner.spawn": lambda session: Session(spawner=5),
    "profiles": lambda session: SessionPool([]),
    "profiles ": lambda session: SessionPool({}),
    "profile 'a'": lambda session: SessionPool({"a": 5}),
    "listener": lambda session: session.add_state_listener(5),
    "listener ": lambda session: session.add_health_listener(None),
    "interceptor": lambda session: session.add_message_interceptor("x"),
    "source": lambda session: session.run(b"1"),
    "execution_id": lambda session: session.run("1", execution_id=5),
    "timeout_s": lambda session: session.run("1", timeout_s="5"),
    "timeout_s ": lambda session: session.run("1", timeout_s=float("nan")),
    "timeout_s  ": lambda session: session.receive_message(-1),
    "timeout_s   ": lambda session: session.namespace_summary("x"),
    "timeout_s    ": lambda session: session.checkpoint([]),
    "timeout_s     ": lambda session: session.restore(b"", timeout_s=True),
    "on_busy": lambda session: session.run("1", on_busy="queue"),
    "execution_id ": lambda session: session.cancel(["e"]),
    "grace_s": lambda session: session.cancel("e", grace_s="5"),
    "grace_s ": lambda session: session.cancel("e", grace_s=-1),
    "execution_id  ": lambda session: session.interrupt(5),
    "execution_id   ": lambda session: session.stack("\ud800"),
    "text": lambda session: session.input_response(None, request_id="r", execution_id="e"),
    "request_id": lambda session: session.input_response("x", request_id=[], execution_id="e"),
    "mode": lambda session: session.restore(b"", mode="overwrite"),
    "reason": lambda session: session.shutdown(5),
    "reason ": lambda session: session.shutdown("\ud800"),
}
"""Calls with an argument of the wrong kind, by the argument that the error must name."""


async def test_wrong_arguments_are_refused_by_name_and_do_no_harm() -> None:
    async with asyncio.timeout(HANG_S), Session() as session:
        for name, call in REFUSED.items():
            with pytest.raises((TypeError, ValueError), match=rf"^{name.strip()} must "):
                await _done(call(session))
        assert (await session.run("1 + 1")).value == 2


async def _done(answer: Any) -> None:
    if inspect.isawaitable(answer):
        await answer


async def test_an_answer_that_cannot_be_sent_can_be_given_again() -> None:
    async with asyncio.timeout(HANG_S), Session() as session:
        async for message in session.execute("input()", execution_id="e"):
            if isinstance(message, InputRequest):
                with pytest.raises(UnicodeEncodeError):
                    await session.input_response("\ud800", request_id=message.id, execution_id="e")
                await session.input_response("Ada", request_id=message.id, execution_id="e")
        assert isinstance(message, Result)
        assert message.value == "Ada"


ELSEWHERE: dict[str, Callable[[Session], Any]] = {
    "execute()": lambda session: session.run("1"),
    "namespace_summary()": lambda session: session.namespace_summary(),
    "stack()": lambda session: session.stack(),
    "checkpoint()": lambda session: session.checkpoint(),
    "restore()": lambda session: session.restore(b""),
    "receive_message()": lambda session: session.receive_message(),
    "restart()": lambda session: session.restart(),
    "shutdown()": lambda session: session.shutdown(),
    "terminate()": lambda session: session.terminate(),
}


async def _refused_here(calls: dict[str, Callable[[Any], Any]], owner: Any, hint: str) -> None:
    for call, make in calls.items():
        with pytest.raises(WrongEventLoop, match=rf"^{re.escape(call)} .*{hint}$"):
            await _done(make(owner))


async def test_another_event_loop_is_refused_and_the_session_goes_on() -> None:
    async with asyncio.timeout(HANG_S), Session() as session:
        elsewhere = _refused_here(ELSEWHERE, session, "call it there")
        await asyncio.to_thread(asyncio.run, elsewhere)
        assert (await session.run("1 + 1")).value == 2


def test_a_session_whose_event_loop_is_closed_raises_a_clear_error() -> None:
    session = Session()
    asyncio.run(session.start())
    pid = session.info.pid
    calls = ELSEWHERE | {
        "cancel()": lambda session: session.cancel("e"),
        "interrupt()": lambda session: session.interrupt(),
        "input_response()": lambda session: session.input_response(
            "x", request_id="r", execution_id="e"
        ),
    }
    asyncio.run(_refused_here(calls, session, "make a new one"))
    assert pid is not None
    assert session._child is not None
    process = session._child.process
    os.kill(pid, signal.SIGKILL)
    process._collect()
    process.descriptors.close()
    os.close(process._pidfd)


async def test_an_ended_session_may_start_again_on_another_event_loop() -> None:
    async def another_life(session: Session) -> None:
        await session.shutdown()
        await session.restart()
        assert (await session.run("1 + 1")).value == 2
        await session.shutdown()

    async with asyncio.timeout(HANG_S):
        async with Session() as session:
            pass
        await asyncio.to_thread(asyncio.run, another_life(session))


async def test_a_pool_stays_on_its_event_loop_and_does_not_start_twice() -> None:
    async with asyncio.timeout(HANG_S):
        async with SessionPool() as pool, pool.borrow() as session:
            calls: dict[str, Callable[[Any], Any]] = {
                "acquire()": lambda pool: pool.acquire(),
                "release()": lambda pool: pool.release(session),
                "retire()": lambda pool: pool.retire(session),
                "stop()": lambda pool: pool.stop(),
            }
            elsewhere = _refused_here(calls, pool, "call it there")
            await asyncio.to_thread(asyncio.run, elsewhere)
        with pytest.raises(PoolUnavailable, match="it was stopped; make a new pool"):
            await pool.start()
