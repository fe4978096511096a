"""One execution, seen from anywhere: what it says, how it stands, and telling it something."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

from celery.result import AsyncResult

from capsule_tasks.client.cancelling import (
    Asked,
    cancel_all,
    cancel_answer,
    check_type,
    ended_without_stream,
)
from capsule_tasks.client.watching.results import keeps_results, stored_end
from capsule_tasks.client.watching.watch_thread import watch_thread
from capsule_tasks.errors import (
    ExecutionEnded,
    ExecutionUnknown,
    InternalError,
    NoOpenQuestion,
    NoResult,
)
from capsule_tasks.protocol.events import (
    AttemptEnded,
    Command,
    Ended,
    InterruptCommand,
    Outcome,
    RespondCommand,
    StackCommand,
    Stacks,
)
from capsule_tasks.protocol.messages import InputClosed, InputRequest, Output
from capsule_tasks.storage.executions.types import Event, Record, State

log = logging.getLogger("capsule_tasks.client")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """How an execution stands."""

    execution_id: str
    state: State
    outcome: str
    task: str
    worker: str
    attempt: int
    begun_at: float | None
    ended_at: float | None


class Streaming:
    """What an execution's id and its app are enough for."""

    id: str
    app: Any
    ignored: bool

    # --- watching ------------------------------------------------------------------------------

    async def aevents(self, after: str | None = None) -> AsyncGenerator[Event, None]:
        """Every event after that id, each once and in order; the terminal one is the last.

        Waits for what is still to come, also for a task that has not begun. Where events are gone
        (trimmed, expired), a `Gap` stands for them. A task whose stream has expired, or that ran
        on another pool, ends with what the result backend says.
        """
        _check_id(after)
        watcher = await watch_thread.watcher(self.app)
        events = watcher.events(self.id, after, self._ask_stored, self._result_channel())
        try:
            async for event in events:
                yield event
        finally:
            await events.aclose()

    def events(self, after: str | None = None) -> Iterator[Event]:
        """As `aevents`, for callers that block."""
        _check_id(after)
        return watch_thread.iterate(lambda: self.aevents(after))

    async def aoutput(self, after: str | None = None) -> AsyncIterator[str]:
        """The text that it writes, both streams, as it comes."""
        async for event in self.aevents(after):
            if isinstance(event.message, Output):
                yield event.message.data

    def output(self, after: str | None = None) -> Iterator[str]:
        """As `aoutput`, for callers that block."""
        for event in self.events(after):
            if isinstance(event.message, Output):
                yield event.message.data

    def tail(self, limit: int = 100) -> list[Event]:
        """The last events that are there now; nothing is waited for."""
        return watch_thread.call(self.atail(limit))

    async def atail(self, limit: int = 100) -> list[Event]:
        check_limit(limit)
        watcher = await watch_thread.watcher(self.app)
        events: list[Event] = []
        after = ""
        while (page := await watcher.store.read(self.id, after)) and page.events:
            events += page.events
            del events[: -limit or None]
            after = page.events[-1].id
        return events

    async def asnapshot(self) -> Snapshot:
        """How it stands now; of a task without a stream as far as the result backend knows."""
        watcher = await watch_thread.watcher(self.app)
        record = await watcher.store.read_record(self.id)
        if record.state == "unknown":
            ends = await ended_without_stream(self.app, watcher, [self.id])
            if (ended := ends.get(self.id)) is not None:
                record = Record("ended", outcome=str(ended.outcome))
        return Snapshot(
            execution_id=self.id,
            state=record.state,
            outcome=record.outcome,
            task=record.task,
            worker=record.worker,
            attempt=record.attempt,
            begun_at=record.claimed_at,
            ended_at=record.ended_at,
        )

    def snapshot(self) -> Snapshot:
        return watch_thread.call(self.asnapshot())

    async def aget(self, timeout_s: float | None = None) -> Any:
        """The task's value, or what it raised; as `AsyncResult.get`, and no thread waits.

        Where the result backend has nothing (ignored, expired, lost): None if it succeeded and its
        result is ignored, or is None; else NoResult, which says how it ended.
        """
        async with asyncio.timeout(timeout_s):
            async for event in self.aevents():
                if isinstance(event.message, Ended):
                    return await self._value(event.message, is_from_stream=event.at > 0)
        raise InternalError(f"the events of execution {self.id!r} came to no end")

    # --- telling -------------------------------------------------------------------------------

    async def acancel(self, grace_s: float | None = None) -> Asked:
        """Have it stopped: in order within the grace, then by force. Safe twice.

        Before the start the cancel waits for it, also through a restart of the worker; on a pool
        without streams it is Celery's revoke.
        """
        return (await cancel_all(self.app, [self.id], grace_s))[self.id]

    def cancel(self, grace_s: float | None = None) -> Asked:
        return watch_thread.call(self.acancel(grace_s))

    async def ainterrupt(self) -> Asked:
        """Raise KeyboardInterrupt in it, as Ctrl-C does; nothing happens before it begins."""
        return await self._tell(InterruptCommand())

    def interrupt(self) -> Asked:
        return watch_thread.call(self.ainterrupt())

    async def arespond(
        self, text: str, *, request_id: str | None = None, eof: bool = False
    ) -> None:
        """Answer the question it asks: the one that is open, or the one that is named.

        Raises NoOpenQuestion if no question is open. Of several answers the first one counts. A
        question that was answered through this object is not answered again, even if the task has
        not taken the answer yet.
        """
        check_type("text", text, str)
        answered: set[str] = self.__dict__.setdefault("_answered", set())
        if request_id is None:
            open_ones = await self._open_questions()
            request_id = next((one for one in open_ones if one not in answered), None)
            if request_id is None:
                raise NoOpenQuestion(self.id)
        check_type("request_id", request_id, str)
        asked = await self._tell(RespondCommand(text=text, request_id=request_id, eof=eof))
        if asked != "asked":
            raise NoOpenQuestion(self.id)
        answered.add(request_id)

    def respond(self, text: str, *, request_id: str | None = None, eof: bool = False) -> None:
        watch_thread.call(self.arespond(text, request_id=request_id, eof=eof))

    async def aquestion(self) -> InputRequest | None:
        """The question that it asks now, if it does; of several the first that is open."""
        return next(iter((await self._open_questions()).values()), None)

    async def _open_questions(self) -> dict[str, InputRequest]:
        questions: dict[str, InputRequest] = {}
        for event in await self.atail(10_000):
            match event.message:
                case InputRequest(id=request_id) as question:
                    questions[request_id] = question
                case InputClosed(request_id=request_id):
                    questions.pop(request_id, None)
                case AttemptEnded() | Ended():
                    questions.clear()  # whoever died while asking has not closed them
        return questions

    def question(self) -> InputRequest | None:
        return watch_thread.call(self.aquestion())

    async def astack(self, timeout_s: float = 10.0, *, all_frames: bool = False) -> str:
        """The Python stacks of its process, wherever it runs.

        From the first frame of the task's own code on, unless `all_frames` are wanted.
        """
        request_id = uuid.uuid4().hex
        tail = await self.atail(1)
        asked = await self._tell(StackCommand(request_id=request_id, all_frames=all_frames))
        if asked == "waiting" and not tail:
            raise ExecutionUnknown(self.id)
        if asked != "asked":
            raise ExecutionEnded(self.id, "")
        async with asyncio.timeout(timeout_s):
            async for event in self.aevents(tail[-1].id if tail else None):
                said = event.message
                if isinstance(said, Stacks) and said.in_reply_to == request_id:
                    return said.text
        raise ExecutionEnded(self.id, "")

    def stack(self, timeout_s: float = 10.0, *, all_frames: bool = False) -> str:
        return watch_thread.call(self.astack(timeout_s, all_frames=all_frames))

    async def _tell(self, command: Command) -> Asked:
        watcher = await watch_thread.watcher(self.app)
        states = await watcher.send_command_to_all([self.id], command)
        asked = (await cancel_answer(self.app, watcher, states))[self.id]
        if asked == "over":
            told = type(command).__struct_config__.tag
            log.info("execution %s is over: %s is ignored", self.id, told)
        return asked

    # --- the result backend --------------------------------------------------------------------

    def _ask_stored(self, task_id: str) -> tuple[Ended | None, bool]:
        return stored_end(self.app, task_id)

    def _result_channel(self) -> str | None:
        """The channel on which a Redis backend says that a result is there."""
        key = getattr(self.app.backend, "get_key_for_task", None)
        consumer = getattr(self.app.backend, "result_consumer", None)
        if key is None or consumer is None or not hasattr(self.app.backend, "connparams"):
            return None
        name = key(self.id)
        return name.decode() if isinstance(name, bytes) else str(name)

    async def _value(self, ended: Ended, *, is_from_stream: bool) -> Any:
        """What the backend has of one that ended so; it may be stored a moment after the stream.

        Who heard the end elsewhere has just asked the backend: it has the result, or never will.
        """
        result = AsyncResult(self.id, app=self.app)
        keeps = keeps_results(self.app)
        is_kept = keeps and not (self.ignored or self.app.conf.task_ignore_result)
        has_value = is_kept and is_from_stream and ended.outcome not in _WITHOUT_RESULT
        for pause_s in (0.0, *_PAUSES_S) if has_value else (0.0,):
            await asyncio.sleep(pause_s)
            if keeps and await asyncio.to_thread(result.ready):
                return result.get(disable_sync_subtasks=False)
        if ended.outcome == Outcome.SUCCEEDED and (
            not is_kept or ended.result_text in ("", "None")
        ):
            return None  # of any other value it would be wrong: not every backend is read from here
        raise NoResult(self.id, ended.outcome, ": ".join(filter(None, (ended.type, ended.message))))


_PAUSES_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
_WITHOUT_RESULT = (Outcome.IGNORED, Outcome.REJECTED)


def current_app() -> Any:
    from celery import current_app as known  # noqa: PLC0415  the app is known when one is asked for

    return known._get_current_object()  # noqa: SLF001  there is no public way


def check_limit(limit: int) -> None:
    if limit < 0:
        raise ValueError(f"limit = {limit!r}: must be how many events, from 0")


_LARGEST_ID = 2**53
"""Beyond that the numbers of Redis's scripts are not exact."""


def _check_id(after: str | None) -> None:
    if after is None:
        return
    check_type("after", after, str)
    attempt, dash, seq = after.partition("-")
    is_one = bool(dash) and all(part.isdecimal() and part.isascii() for part in (attempt, seq))
    if not is_one or max(int(attempt), int(seq)) > _LARGEST_ID:
        raise ValueError(f"after = {after!r}: must be the id of an event")
