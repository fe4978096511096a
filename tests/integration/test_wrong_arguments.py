"""What a careless caller passes is refused with the argument's name, before it can do harm."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import pytest

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
