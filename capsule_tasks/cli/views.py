"""What the commands show: events and tables, for people and as JSON."""

from __future__ import annotations

import re
from typing import Any

import click
import msgspec

from capsule_tasks.cli.terminal import Cleaner, cleaned, without_controls
from capsule_tasks.client import Event, Failure, GroupState
from capsule_tasks.protocol.events import (
    Accepted,
    AttemptClaimed,
    AttemptEnded,
    Ended,
    Outcome,
    Stacks,
    UnknownEvent,
)
from capsule_tasks.protocol.messages import Gap, InputRequest, Output, Progress
from capsule_tasks.storage.executions.types import RecentEntry

_BAR = 30
_CONTROLS = re.compile("[\x7f-\x9f]")


def as_json(event: Event) -> str:
    """One line: the event with its id, its time and its type."""
    message: Any = event.message
    fields = msgspec.to_builtins(message, str_keys=True)
    fields["t"] = getattr(message.__struct_config__, "tag", None) or "unknown"
    for name in ("timestamp", "execution_id"):
        fields.pop(name, None)
    if not isinstance(message, InputRequest):
        fields.pop("id", None)
    return format_line({"event": event.id, "at": event.at, **fields})


class EventPrinter:
    """Shows events one after another: what was written as it is, the rest in lines of its own."""

    def __init__(self, *, answer_with: str, raw: bool) -> None:
        """`answer_with` is the command that answers a question of the execution."""
        self._answer_with = answer_with
        self._raw = raw
        self._cleaners = {"stdout": Cleaner(), "stderr": Cleaner()}
        self._is_in_line = False

    def show(self, event: Event) -> None:
        message = event.message
        if isinstance(message, Output):
            text = message.data if self._raw else self._cleaners[message.stream].clean(message.data)
            if text:
                # What is piped has no colours, unless all was asked for.
                colour = True if self._raw else None
                click.echo(text, nl=False, err=message.stream == "stderr", color=colour)
                self._is_in_line = not text.endswith("\n")
            return
        said = _told(message, self._answer_with)
        if said:
            if self._is_in_line:
                click.echo()
                self._is_in_line = False
            ending = "".join(cleaner.end() for cleaner in self._cleaners.values())
            click.echo(f"{ending}{click.style(said, dim=True)}", err=True)


def _told(message: Any, answer_with: str) -> str:
    match message:
        case AttemptClaimed():
            return f"-- begun by {cleaned(message.worker)}"
        case Progress():
            total = f"/{message.total:g}" if message.total is not None else ""
            note = f" {cleaned(message.note)}" if message.note else ""
            return f"-- {message.done:g}{total}{note}"
        case InputRequest():
            return f"-- asks: {cleaned(message.prompt)}\n-- answer with: {answer_with}"
        case Gap():
            return f"-- {message.lost_bytes} bytes in {message.lost_messages} events are missing"
        case AttemptEnded():
            return f"-- attempt ended ({message.outcome}) {cleaned(message.detail)}"
        case Ended():
            return f"-- {message.outcome}{_why(message)}"
        case Stacks():
            return without_controls(message.text)
        case UnknownEvent():
            return f"-- an event of an unknown type: {cleaned(message.type)}"
        case Accepted():
            return ""
    return ""


def _why(ended: Ended) -> str:
    if ended.type:
        return f": {cleaned(ended.type)}: {cleaned(ended.message)}"
    return f": {cleaned(ended.result_text)}" if ended.result_text else ""


def exit_status(event: Event | None) -> int:
    """0 for a task that succeeded, 1 for any other end."""
    message = event.message if event is not None else None
    return 0 if isinstance(message, Ended) and message.outcome == Outcome.SUCCEEDED else 1


def bar(state: GroupState) -> str:
    """A group's progress in one line."""
    share = state.done / state.total if state.total else 1.0
    filled = int(share * _BAR)
    return f"[{'#' * filled}{'-' * (_BAR - filled)}] {state.done}/{state.total} {counts(state)}"


def counts(state: GroupState) -> str:
    """How many members of a group have ended, by outcome."""
    return ", ".join(f"{count} {outcome}" for outcome, count in sorted(state.counts.items()))


def group_status(state: GroupState | None) -> int:
    """0 for a group of which every member succeeded, 1 for any other end."""
    return 0 if state and state.counts.get(Outcome.SUCCEEDED, 0) >= state.total else 1


def format_line(record: dict[str, Any]) -> str:
    """JSON that a terminal obeys nothing of: also C1 controls and DEL, which JSON lets pass."""
    text = msgspec.json.encode(record).decode()
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def failure_line(failure: Failure) -> str:
    return click.style(f"{cleaned(failure.execution_id)}: {cleaned(failure.reason)}", fg="red")


def entry_json(entry: RecentEntry) -> str:
    return format_line(
        {
            "id": entry.execution_id,
            "state": entry.state,
            "task": entry.task,
            "worker": entry.worker,
            "began_at": entry.started_at,
            "noted_at": entry.recorded_at,
        }
    )


def queued_json(queue: str, length: int | None) -> str:
    """A queue in the form of an entry, so that one script reads both."""
    return format_line({"id": None, "state": "queued", "queue": queue, "length": length})


def queued_line(lengths: dict[str, int | None]) -> str:
    """What waits in the queues, in one line."""
    queues = (
        f"{cleaned(queue)} {'unknown' if length is None else length}"
        for queue, length in lengths.items()
    )
    return f"queued: {', '.join(queues)}"
