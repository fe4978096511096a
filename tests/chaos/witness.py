"""A consumer of one execution who checks the promise: one terminal message, and it comes last."""

from __future__ import annotations

import asyncio
import random
from typing import Any, Literal

from capsule_tasks.errors import ExecutionTimeout, SessionStateError
from capsule_tasks.protocol.messages import Ack, Message, Output, Terminal
from capsule_tasks.sessions import Session
from tests.chaos.recorder import Recorder

Manner = Literal["read", "dawdle", "pause", "close", "drop"]
"""How to consume: to the end; slowly; not before `resume`; or leave early, well or badly."""


class Witness:
    """Follows one execution in a task of its own."""

    def __init__(
        self,
        recorder: Recorder,
        rng: random.Random,
        execution_id: str,
        source: str,
        manner: Manner = "read",
        **options: Any,
    ) -> None:
        self.execution_id = execution_id
        self.messages: list[Message] = []
        self.terminal: Any = None
        self.refusal: Exception | None = None
        self.has_left = False
        self.cancelled_by_us = False
        self.acked = asyncio.Event()
        self.spoke = asyncio.Event()
        self.resume = asyncio.Event()
        self._recorder = recorder
        self._rng = rng
        self._manner = manner
        self._patience = rng.randrange(1, 8)
        session: Session = recorder.session
        recorder.note(f"execute {execution_id} {source[:40]!r} {manner} {options}")
        self._generator: Any = session.execute(source, execution_id=execution_id, **options)
        self.task = asyncio.create_task(self._follow(), name=f"witness of {execution_id}")

    def cancel(self) -> None:
        self.cancelled_by_us = True
        self.task.cancel()

    async def ended(self) -> None:
        """Wait until there is nothing more to come; AssertionError if it came otherwise."""
        self.resume.set()
        await asyncio.wait({self.task})
        if self.task.cancelled():
            assert self.cancelled_by_us, f"{self.execution_id}: nothing cancelled it"
            return
        self.task.result()

    async def _follow(self) -> None:
        recorder, name = self._recorder, self.execution_id
        try:
            await self._read()
        except ExecutionTimeout:
            assert self.terminal is not None, f"{name}: a timeout before the terminal message"
        except SessionStateError as error:
            assert not self.messages, f"{name}: refused after {self.messages}"
            self.refusal = error
        finally:
            self._generator = None
            self.acked.set()
            self.spoke.set()
            recorder.note(f"{name} is through: {self.terminal or self.refusal or 'left'!s:.150}")
        if not self.has_left and self.refusal is None:
            assert self.terminal is not None, f"{name}: no terminal message"

    async def _read(self) -> None:
        async for message in self._generator:
            self._check(message)
            await self._linger()
            if self.has_left:
                return

    def _check(self, message: Message) -> None:
        name = self.execution_id
        assert getattr(message, "execution_id", None) == name, f"{name} got {message}"
        assert self.terminal is None, f"{name}: {message} after {self.terminal}"
        if isinstance(message, Ack):
            assert not self.messages, f"{name}: Ack after {self.messages[:3]}"
            self.acked.set()
        if isinstance(message, Output):
            self.spoke.set()
        if isinstance(message, Terminal):
            self.terminal = message
        if len(self.messages) < 50:
            self.messages.append(message)

    async def _linger(self) -> None:
        self._patience -= 1
        if self._manner == "dawdle" and self._patience > -100:
            await asyncio.sleep(self._rng.random() * 0.01)
        elif self._manner == "pause":
            await self.resume.wait()
        elif self._manner in ("close", "drop") and self._patience <= 0:
            self.has_left = self.terminal is None
            if self.has_left and self._manner == "close":
                await self._generator.aclose()
