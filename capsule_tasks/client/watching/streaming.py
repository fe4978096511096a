"""Watch one execution from any process, read its state, and send it commands."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

from celery.result import AsyncResult

from capsule_tasks.client.cancelling import (
    CancelAnswer,
    cancel_all,
    cancel_answers,
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
    """The state of an execution at one moment."""

    execution_id: str
    state: State
    outcome: str
    task: str
    worker: str
    attempt: int
    begun_at: float | None
    ended_at: float | None


class Streaming:
    """Everything that needs only an execution's id and its app."""

    id: str
    app: Any
    ignored: bool

    # --- watching ------------------------------------------------------------------------------

    async def aevents(self, after: str | None = None) -> AsyncGenerator[Event, None]:
        """Every event after the id `after`, each once and in order; the last one is `Ended`.

        Waits for events that are still to come, also of a task that has not started. A `Gap`
        stands for events that were trimmed or have expired. A task whose stream has expired, or
        that ran on another pool, ends with the outcome that the result backend has stored.
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

    def tail(self, limit: int = 100) -> list[Event]:
        """The last events that are stored now, without waiting for more."""
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
        """The state now; for a task without a stream, the state in the result backend."""
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
        """Return the task's value or raise its exception, as `AsyncResult.get`; no thread waits.

        If the result backend has no result (ignored, expired, lost): None for a task that succeeded
        and whose result is None or ignored; otherwise NoResult, which names the outcome.
        """
        async with asyncio.timeout(timeout_s):
            async for event in self.aevents():
                if isinstance(event.message, Ended):
                    return await self._value(event.message, is_from_stream=event.at > 0)
        raise InternalError(f"the events of execution {self.id!r} came to no end")

    # --- commands ------------------------------------------------------------------------------

    async def acancel(self, grace_s: float | None = None) -> CancelAnswer:
        """Cancel the execution: in order within the grace, then by force. Safe to repeat.

        A task that has not started is cancelled when a worker claims it, also after a restart of
        the worker. On a pool without streams the cancel is Celery's revoke.
        """
        return (await cancel_all(self.app, [self.id], grace_s))[self.id]

    def cancel(self, grace_s: float | None = None) -> CancelAnswer:
        return watch_thread.call(self.acancel(grace_s))

    async def ainterrupt(self) -> CancelAnswer:
        """Raise KeyboardInterrupt in the running task, as Ctrl-C does. Ignored before the start."""
        return await self._send_command(InterruptCommand())

    def interrupt(self) -> CancelAnswer:
        return watch_thread.call(self.ainterrupt())

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

    def respond(self, text: str, *, request_id: str | None = None, eof: bool = False) -> None:
        watch_thread.call(self.arespond(text, request_id=request_id, eof=eof))

    async def aquestion(self) -> InputRequest | None:
        """The first question that is open now, or None."""
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
                    questions.clear()  # a child that dies does not close its questions
        return questions

    def question(self) -> InputRequest | None:
        return watch_thread.call(self.aquestion())

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

    def stack(self, timeout_s: float = 10.0, *, all_frames: bool = False) -> str:
        return watch_thread.call(self.astack(timeout_s, all_frames=all_frames))

    async def _send_command(self, command: Command) -> CancelAnswer:
        watcher = await watch_thread.watcher(self.app)
        states = await watcher.send_command_to_all([self.id], command)
        answer = (await cancel_answers(self.app, watcher, states))[self.id]
        if answer == "over":
            name = type(command).__struct_config__.tag
            log.info("execution %s has ended: command %s ignored", self.id, name)
        return answer

    # --- the result backend --------------------------------------------------------------------

    def _ask_stored(self, task_id: str) -> tuple[Ended | None, bool]:
        return stored_end(self.app, task_id)

    def _result_channel(self) -> str | None:
        """The channel on which a Redis result backend announces the result."""
        key = getattr(self.app.backend, "get_key_for_task", None)
        consumer = getattr(self.app.backend, "result_consumer", None)
        if key is None or consumer is None or not hasattr(self.app.backend, "connparams"):
            return None
        name = key(self.id)
        return name.decode() if isinstance(name, bytes) else str(name)

    async def _value(self, ended: Ended, *, is_from_stream: bool) -> Any:
        """The result of a task that has ended.

        A result can be stored a moment after the last event, so the backend is asked more than
        once. An end that came from the backend itself needs no second question.
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
            return None  # another value may be in a backend that this process cannot read
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
"""Numbers in Lua scripts are exact up to here."""


def _check_id(after: str | None) -> None:
    if after is None:
        return
    check_type("after", after, str)
    attempt, dash, seq = after.partition("-")
    is_one = bool(dash) and all(part.isdecimal() and part.isascii() for part in (attempt, seq))
    if not is_one or max(int(attempt), int(seq)) > _LARGEST_ID:
        raise ValueError(f"after = {after!r}: must be the id of an event")
