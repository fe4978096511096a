"""`Execution`: what `.delay()` returns, also made from an id."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from celery.result import AsyncResult, EagerResult

from capsule_tasks.client.cancelling import (
    CancelAnswer,
    cancel_all,
    check_grace,
    check_type,
    ended_without_stream,
    send_to_all,
)
from capsule_tasks.client.revokes import store_revokes
from capsule_tasks.client.watching.results import end_from_meta, keeps_results, stored_end
from capsule_tasks.client.watching.watch_thread import blocking, watch_thread
from capsule_tasks.client.watching.watcher import (
    LookAfter,
    StreamCursor,
    StreamWatch,
)
from capsule_tasks.errors import (
    ExecutionEnded,
    ExecutionUnknown,
    InternalError,
    InvalidId,
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

_PAUSES_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
_WITHOUT_RESULT = (Outcome.IGNORED, Outcome.REJECTED)
_LARGEST_ID = 2**53
"""Numbers in Lua scripts are exact up to here."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of an execution at one moment."""

    execution_id: str
    state: State
    outcome: str
    task: str
    worker: str
    attempt: int
    begun_at: float | None
    ended_at: float | None


class Execution(AsyncResult):
    """An `AsyncResult` of a task that runs in a session. The task id is the execution id.

    Watching has no side effects: any number of watchers may watch one execution, from any process,
    at any time. Each blocking method has an asyncio form whose name begins with `a`.
    """

    is_new = False
    """Made by the call that has just submitted it."""

    def __init__(self, execution_id: str, *args: Any, **options: Any) -> None:
        check_type("execution_id", execution_id, str)
        if not execution_id:
            raise InvalidId("execution id", execution_id, "must not be empty")
        super().__init__(execution_id, *args, **options)

    @classmethod
    def of(cls, result: AsyncResult) -> Self:
        """The execution of a Celery result."""
        made = cls(result.id, app=result.app)
        made.ignored = result.ignored
        return made

    def revoke(self, *args: Any, **options: Any) -> None:
        """Revoke as Celery does, and store the revoke for workers that are not running now."""
        store_revokes(self.app, self.id)
        super().revoke(*args, **options)

    # --- watching ------------------------------------------------------------------------------

    async def aevents(self, after: str | None = None) -> AsyncGenerator[Event, None]:
        """Every event after the id `after`, each once and in order; the last one is `Ended`.

        Waits for events that are still to come, also of a task that has not started. A `Gap`
        stands for events that were trimmed or have expired. A task whose stream has expired, or
        that ran on another pool, ends with the outcome that the result backend has stored.
        """
        _check_id(after)
        watcher = await watch_thread.watcher(self.app)
        cursor, ask = StreamCursor(self.id, after), partial(stored_end, self.app)
        channel, look_after = self._result_channel(), self._look_after()
        watch = StreamWatch(watcher, cursor, ask, channel, self.is_new, look_after)
        async with aclosing(watch.events()) as events:
            async for event in events:
                yield event

    def _look_after(self) -> LookAfter | None:
        """A check for callers who wait for the execution; None for a task, which has its broker."""
        return None

    def events(self, after: str | None = None) -> Iterator[Event]:
        """The blocking form of `aevents`."""
        _check_id(after)
        return watch_thread.iterate(lambda: self.aevents(after))

    async def aoutput(self, after: str | None = None) -> AsyncIterator[str]:
        """The text that the task writes to stdout and stderr, as it arrives."""
        async for event in self.aevents(after):
            if isinstance(event.message, Output):
                yield event.message.data

    def output(self, after: str | None = None) -> Iterator[str]:
        """The blocking form of `aoutput`."""
        for event in self.events(after):
            if isinstance(event.message, Output):
                yield event.message.data

    async def atail(self, limit: int = 100) -> list[Event]:
        """The last events that are stored now, without waiting for more."""
        _check_limit(limit)
        watcher = await watch_thread.watcher(self.app)
        events: list[Event] = []
        after = ""
        while (page := await watcher.store.read(self.id, after)) and page.events:
            events += page.events
            del events[: -limit or None]
            after = page.events[-1].id
        return events

    tail = blocking(atail)

    async def asnapshot(self) -> Snapshot:
        """The state now; for a task without a stream, the state in the result backend."""
        record = await self._read_record()
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

    snapshot = blocking(asnapshot)

    async def _read_record(self) -> Record:
        watcher = await watch_thread.watcher(self.app)
        record = await watcher.store.read_record(self.id)
        if record.state == "unknown":
            ends = await ended_without_stream(self.app, watcher, [self.id])
            if (ended := ends.get(self.id)) is not None:
                return Record("ended", outcome=str(ended.outcome))
        return record

    async def aget(self, timeout_s: float | None = None) -> Any:
        """Return the task's value or raise its exception, as `AsyncResult.get`; no thread waits.

        If the result backend has no result (ignored, expired, lost): None for a task that succeeded
        and whose result is None or ignored; otherwise NoResult, which names the outcome.
        """
        async with asyncio.timeout(timeout_s):
            async for event in self.aevents():
                if isinstance(event.message, Ended):
                    return await self.value_at(event)
        raise InternalError(f"the events of execution {self.id!r} came to no end")

    # --- commands ------------------------------------------------------------------------------

    async def acancel(self, grace_s: float | None = None) -> CancelAnswer:
        """Cancel the execution: in order within the grace, then by force. Safe to repeat.

        A task that has not started is cancelled when a worker claims it, also after a restart of
        the worker. On a pool without streams the cancel is Celery's revoke.
        """
        return (await cancel_all(self.app, [self.id], grace_s))[self.id]

    cancel = blocking(acancel)

    async def ainterrupt(self) -> CancelAnswer:
        """Raise KeyboardInterrupt in the running task, as Ctrl-C does. Ignored before the start."""
        return await self._send_command(InterruptCommand())

    interrupt = blocking(ainterrupt)

    async def arespond(
        self, text: str, *, request_id: str | None = None, eof: bool = False
    ) -> None:
        """Answer the open question, or the question `request_id`.

        Raises NoOpenQuestion if no question is open. The first of several answers counts. A
        question that was answered through this object is not answered again, even if the task has
        not read the answer yet.
        """
        check_type("text", text, str)
        answered: set[str] = self.__dict__.setdefault("_answered", set())
        if request_id is None:
            open_ones = await self._open_questions()
            request_id = next((one for one in open_ones if one not in answered), None)
            if request_id is None:
                raise NoOpenQuestion(self.id)
        check_type("request_id", request_id, str)
        answer = await self._send_command(RespondCommand(text=text, request_id=request_id, eof=eof))
        if answer != "requested":
            raise NoOpenQuestion(self.id)
        answered.add(request_id)

    respond = blocking(arespond)

    async def aquestion(self) -> InputRequest | None:
        """The first question that is open now, or None."""
        return next(iter((await self._open_questions()).values()), None)

    question = blocking(aquestion)

    async def _open_questions(self) -> dict[str, InputRequest]:
        questions: dict[str, InputRequest] = {}
        for event in await self.atail(10_000):
            match event.message:
                case InputRequest(id=request_id) as question:
                    questions[request_id] = question
                case InputClosed(request_id=request_id):
                    questions.pop(request_id, None)
                case AttemptEnded() | Ended():
                    questions.clear()  # a child that dies does not close its questions
        return questions

    async def astack(self, timeout_s: float = 10.0, *, all_frames: bool = False) -> str:
        """The Python stacks of the child that runs the task, on any worker.

        Each stack starts at the first frame of the task's own code, unless `all_frames` is set.
        """
        request_id = uuid.uuid4().hex
        tail = await self.atail(1)
        answer = await self._send_command(
            StackCommand(request_id=request_id, all_frames=all_frames)
        )
        if answer == "pending" and not tail:
            raise ExecutionUnknown(self.id)
        if answer != "requested":
            raise ExecutionEnded(self.id, "")
        async with asyncio.timeout(timeout_s):
            async for event in self.aevents(tail[-1].id if tail else None):
                message = event.message
                if isinstance(message, Stacks) and message.in_reply_to == request_id:
                    return message.text
        raise ExecutionEnded(self.id, "")

    stack = blocking(astack)

    async def _send_command(self, command: Command) -> CancelAnswer:
        return (await send_to_all(self.app, [self.id], command))[self.id]

    # --- the result backend --------------------------------------------------------------------

    def _result_channel(self) -> str | None:
        """The channel on which a Redis result backend announces the result."""
        key = getattr(self.app.backend, "get_key_for_task", None)
        consumer = getattr(self.app.backend, "result_consumer", None)
        if key is None or consumer is None or not hasattr(self.app.backend, "connparams"):
            return None
        name = key(self.id)
        return name.decode() if isinstance(name, bytes) else str(name)

    async def value_at(self, end: Event) -> Any:
        """The value after this last event, or the error of the task; see `aget`.

        A result can be stored a moment after the last event, so the backend is asked more than
        once. An end that came from the backend itself needs no second question.
        """
        ended, is_from_stream = end.message, end.at > 0
        if not isinstance(ended, Ended):
            raise TypeError(f"end = {end!r}: must be the last event")
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
            return None  # another value may be in a backend that this process cannot read
        raise NoResult(self.id, ended.outcome, ": ".join(filter(None, (ended.type, ended.message))))


class EagerExecution(EagerResult, Execution):
    """The execution of a task that ran in its caller (`task_always_eager`). Needs no Redis."""

    @classmethod
    def of(cls, result: Any) -> EagerExecution:
        made = cls.__new__(cls)
        made.__dict__.update(vars(result))
        return made

    def events(self, after: str | None = None) -> Iterator[Event]:
        """The one event, its end. Its output went to the streams of the caller."""
        ended = self._ended()
        if after is None and ended is not None:
            yield Event(id="0-1", at=0.0, message=ended)

    async def aevents(self, after: str | None = None) -> AsyncGenerator[Event, None]:
        for event in self.events(after):
            yield event

    async def atail(self, limit: int = 100) -> list[Event]:
        _check_limit(limit)
        return list(self.events())[:limit]

    async def _read_record(self) -> Record:
        ended = self._ended()
        outcome = str(ended.outcome) if ended is not None else ""
        return Record("ended", outcome=outcome, task=self.name or "")

    async def aget(self, timeout_s: float | None = None) -> Any:
        return self.get(timeout=timeout_s)

    async def acancel(self, grace_s: float | None = None) -> CancelAnswer:
        check_grace(grace_s)
        return "over"

    async def _send_command(self, command: Command) -> CancelAnswer:  # noqa: ARG002  as an Execution's
        """An eager task has ended before anybody can send a command."""
        return "over"

    def _ended(self) -> Ended | None:
        return end_from_meta(
            {"status": self.state, "result": self.result, "traceback": self.traceback}
        )


def _check_limit(limit: int) -> None:
    if limit < 0:
        raise ValueError(f"limit = {limit!r}: must be how many events, from 0")


def _check_id(after: str | None) -> None:
    if after is None:
        return
    check_type("after", after, str)
    attempt, dash, seq = after.partition("-")
    is_one = bool(dash) and all(part.isdecimal() and part.isascii() for part in (attempt, seq))
    if not is_one or max(int(attempt), int(seq)) > _LARGEST_ID:
        raise ValueError(f"after = {after!r}: must be the id of an event")
