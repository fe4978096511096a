"""One execution with a person in front of it."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from datetime import datetime

from capsule_tasks.errors import NoOpenQuestion, UnknownInputRequest
from capsule_tasks.protocol import events
from capsule_tasks.protocol import messages as wire
from capsule_tasks.protocol.ids import new_id
from capsule_tasks.sessions.console.frontend import Frontend
from capsule_tasks.sessions.console.target import Shown, Target


class Foreground:
    """Shows the output of the execution; lines answer its questions, Ctrl-C cancels it.

    One message is fetched at a time, so a screen that is slow to take output holds up the code
    that writes it and fills no memory here.
    """

    def __init__(self, target: Target, frontend: Frontend) -> None:
        self._target = target
        self._frontend = frontend
        self._id = new_id()
        self._answers: dict[str, asyncio.Task[None]] = {}
        self._asking = asyncio.Lock()  # one question after another
        self._running: asyncio.Task[bool] | None = None
        self._cancelling: asyncio.Task[tuple[str, float]] | None = None
        self._is_accepted = False

    def start(self, source: str) -> asyncio.Task[bool]:
        """Run `source` to its end; whether it ended well."""
        self._running = asyncio.create_task(self._run(source))
        return self._running

    def cancel(self) -> None:
        """Cancel the execution; once more only after the answer to the first."""
        if self._cancelling is None or self._cancelling.done():
            self._cancelling = asyncio.create_task(self._cancel())

    async def _run(self, source: str) -> bool:
        messages = self._target.execute(source, self._id)
        try:
            async with aclosing(messages):
                async for message in messages:
                    self._is_accepted = True
                    self._show(message)
        finally:
            for answering in self._answers.values():
                answering.cancel()
        if self._cancelling is not None:
            outcome, elapsed_ms = await self._cancelling
            if outcome:
                self._frontend.note(f"{outcome.replace('_', ' ')} after {elapsed_ms:.1f} ms")
        remark = _remark(message)
        if remark:
            self._frontend.note(remark)
        if isinstance(message, events.Ended):
            return message.outcome == events.Outcome.SUCCEEDED
        return isinstance(message, wire.Result)

    def _show(self, message: Shown) -> None:
        if isinstance(message, wire.InputRequest):
            self._answers[message.id] = asyncio.create_task(self._answer(message))
        elif isinstance(message, wire.InputClosed):
            answering = self._answers.pop(message.request_id, None)
            if answering is not None and message.reason != "answered":
                answering.cancel()
            if message.reason == "timeout":
                self._frontend.note("the question was not answered in time")
        else:
            show(self._frontend, message)

    async def _answer(self, question: wire.InputRequest) -> None:
        async with self._asking:
            line = await self._frontend.ask(question.prompt, password=question.password)
        try:
            await self._target.answer(question, line)
        except (UnknownInputRequest, NoOpenQuestion) as late:
            self._frontend.note(str(late))

    async def _cancel(self) -> tuple[str, float]:
        started_at = time.monotonic()
        outcome = await self._target.cancel(self._id)
        if outcome == "not_running" and not self._is_accepted and self._running is not None:
            self._running.cancel()  # it waits for a child that is not ready yet
        return outcome, (time.monotonic() - started_at) * 1000


def show(frontend: Frontend, message: Shown) -> None:
    """Show one message, or event, that is not about a question."""
    match message:
        case wire.Output():
            frontend.output(message.stream, message.data)
        case wire.Gap():
            frontend.note(f"{message.lost_bytes} bytes of {message.stream} were dropped here")
        case wire.Progress():
            of = f" of {message.total:g}" if message.total is not None else ""
            frontend.note(f"{message.done:g}{of} {message.note}".rstrip())
        case wire.RunEvent():
            frontend.note(f"{message.kind} {message.agent}".rstrip())
        case wire.Error():
            frontend.error(message.traceback or _in_short(message))
        case wire.Result(is_repr=True):
            frontend.answer(str(message.value), f"repr only, of type {message.type_name}")
        case wire.Result() if message.value is not None:
            frontend.answer(_repr(message.value))
        case events.SessionRestored():
            frontend.note(restored_text(message))
        case events.Ended():
            _show_end(frontend, message)


def restored_text(event: events.SessionRestored) -> str:
    """Say in words what a new child of a named session has in its namespace."""
    if event.saved_at is None:
        said = "the session has a new child without a checkpoint: its namespace is empty"
    else:
        saved_at = datetime.fromtimestamp(event.saved_at).astimezone()
        said = f"the session was restored from its checkpoint of {saved_at:%Y-%m-%d %H:%M:%S}"
    if event.lost_calls:
        said += f"; {event.lost_calls} calls since are lost"
    for what, names in (("lost", event.lost), ("different", event.differences)):
        said += f"; {what}: {', '.join(names)}" if names else ""
    return said


def _show_end(frontend: Frontend, ended: events.Ended) -> None:
    match ended.outcome:
        case events.Outcome.SUCCEEDED:
            if ended.result_text not in ("", "None"):
                frontend.answer(ended.result_text)
        case events.Outcome.CANCELLED:
            frontend.note("cancelled")
        case _:
            reason = f"{ended.type}: {ended.message}" if ended.type else str(ended.outcome)
            frontend.error(ended.traceback or reason)


def _repr(value: object) -> str:
    try:
        return repr(value)
    except ValueError as fault:  # an integer of more digits than Python prints
        return f"<{type(value).__name__}: {fault}>"


def _in_short(error: wire.Error) -> str:
    lines = [f"{error.type}: {error.message}", *error.notes]
    if error.stack:
        lines += ["last known stack:", error.stack]
    return "\n".join(lines)


def _remark(end: Shown) -> str:
    """A note about the session if it did not stay usable."""
    match end:
        case wire.Error(kind=wire.ErrorKind.KILLED):
            return "the names are gone with the child; a new one takes its place"
        case wire.Error(kind=wire.ErrorKind.LOST):
            return "the names are gone with the child; :restart starts a new one"
        case wire.Error(type="SystemExit") | events.Ended(type="SystemExit"):
            return "the session goes on; :quit leaves it"
    return ""
