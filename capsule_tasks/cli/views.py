"""Formats events, groups, executions and queues, for a terminal and as JSON."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

import click
import msgspec

from capsule_tasks.cli.terminal import ControlSequenceFilter, cleaned, without_controls
from capsule_tasks.client import Event, Failure, GroupState
from capsule_tasks.protocol import events, messages
from capsule_tasks.sessions.console.commands import table
from capsule_tasks.sessions.console.foreground import restored_text
from capsule_tasks.storage.executions.types import RecentEntry
from capsule_tasks.storage.sessions.checkpoints import CheckpointManifest
from capsule_tasks.storage.sessions.types import NamedSessionInfo

_BAR = 30
_CONTROLS = re.compile("[\x7f-\x9f]")


def as_json(event: Event) -> str:
    """One line with the fields of an event, its id, time and type."""
    message: Any = event.message
    fields = msgspec.to_builtins(message, str_keys=True)
    fields["t"] = getattr(message.__struct_config__, "tag", None) or "unknown"
    for name in ("timestamp", "execution_id"):
        fields.pop(name, None)
    if not isinstance(message, messages.InputRequest):
        fields.pop("id", None)
    if isinstance(message, messages.RunEvent):
        del fields["json"]
        fields["data"] = message.data
    return format_line({"event": event.id, "at": event.at, **fields})


class EventPrinter:
    """Prints output as the task wrote it, and a line for each other event to standard error."""

    def __init__(self, *, respond_with: str, raw: bool) -> None:
        """`respond_with` is the command that answers a question of the execution."""
        self._respond_with = respond_with
        self._raw = raw
        self._filters = {"stdout": ControlSequenceFilter(), "stderr": ControlSequenceFilter()}
        self._is_in_line = False

    def show(self, event: Event) -> None:
        message = event.message
        if isinstance(message, messages.Output):
            text = message.data if self._raw else self._filters[message.stream].feed(message.data)
            if text:
                # click strips colours from piped text; with `--raw` they stay.
                colour = True if self._raw else None
                click.echo(text, nl=False, err=message.stream == "stderr", color=colour)
                self._is_in_line = not text.endswith("\n")
            return
        if line := _describe(message, self._respond_with):
            self.line(line)

    def line(self, line: str) -> None:
        """Print a line to standard error, after what was written in the line before."""
        if self._is_in_line:
            click.echo()
            self._is_in_line = False
        ending = "".join(each.end() for each in self._filters.values())
        click.echo(f"{ending}{click.style(line, dim=True)}", err=True)


def _describe(message: Any, respond_with: str) -> str:
    match message:
        case events.AttemptClaimed():
            return f"-- claimed by {cleaned(message.worker)}"
        case messages.Progress() | messages.RunEvent():
            return _reported(message)
        case messages.InputRequest():
            return f"-- question: {cleaned(message.prompt)}\n-- respond with: {respond_with}"
        case messages.Gap():
            return f"-- {message.lost_bytes} bytes in {message.lost_messages} events are missing"
        case events.SessionRestored():
            return f"-- {cleaned(restored_text(message))}"
        case events.AttemptEnded():
            detail = f" ({cleaned(message.detail)})" if message.detail else ""
            return f"-- attempt ended: {message.outcome}{detail}; another attempt follows"
        case events.Ended():
            return f"-- {message.outcome}{_why(message)}"
        case events.Stacks():
            return without_controls(message.text)
        case events.UnknownEvent():
            return f"-- event of an unknown type: {cleaned(message.type)}"
    return ""


def _reported(event: messages.Progress | messages.RunEvent) -> str:
    """The line of an event that the task has published; none for a piece of a model's reply."""
    if isinstance(event, messages.Progress):
        total = f"/{event.total:g}" if event.total is not None else ""
        note = f" {cleaned(event.note)}" if event.note else ""
        return f"-- {event.done:g}{total}{note}"
    if event.kind == "raw_response_event" and not event.dropped_events:
        return ""
    agent = f" of {cleaned(event.agent)}" if event.agent else ""
    dropped = f" ({event.dropped_events} events before it were dropped)"
    return f"-- {cleaned(event.kind)}{agent}{dropped if event.dropped_events else ''}"


def _why(ended: events.Ended) -> str:
    if ended.type:
        return f": {cleaned(ended.type)}: {cleaned(ended.message)}"
    return f": {cleaned(ended.result_text)}" if ended.result_text else ""


def exit_status(event: Event | None) -> int:
    """0 if the execution succeeded, else 1."""
    message = event.message if event is not None else None
    return (
        0
        if isinstance(message, events.Ended) and message.outcome == events.Outcome.SUCCEEDED
        else 1
    )


def bar(state: GroupState) -> str:
    """The progress of a group in one line."""
    share = state.done / state.total if state.total else 1.0
    filled = int(share * _BAR)
    return f"[{'#' * filled}{'-' * (_BAR - filled)}] {state.done}/{state.total} {counts(state)}"


def counts(state: GroupState) -> str:
    """The number of members that have ended, by outcome."""
    return ", ".join(f"{count} {outcome}" for outcome, count in sorted(state.counts.items()))


def group_status(state: GroupState | None) -> int:
    """0 if every member of the group succeeded, else 1."""
    return 0 if state and state.counts.get(events.Outcome.SUCCEEDED, 0) >= state.total else 1


def format_line(record: dict[str, Any]) -> str:
    """One line of JSON; DEL and the C1 controls, which JSON permits, are escaped too."""
    text = msgspec.json.encode(record).decode()
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def failure_line(failure: Failure) -> str:
    return click.style(f"{cleaned(failure.execution_id)}: {cleaned(failure.reason)}", fg="red")


def entry_json(entry: RecentEntry) -> str:
    fields = msgspec.to_builtins(entry)
    return format_line({"id": fields.pop("execution_id"), **fields})


# --- named sessions ------------------------------------------------------------------------------


def session_row(info: NamedSessionInfo) -> str:
    """One session of a list in one line."""
    return f"{cleaned(info.session_id)}: {session_summary(info)}"


def session_info_json(info: NamedSessionInfo) -> str:
    fields = msgspec.to_builtins(info)
    manifest = info.checkpoint
    fields["checkpoint"] = None if manifest is None else _checkpoint_fields(manifest)
    return format_line({"id": fields.pop("session_id"), **fields})


def session_summary(info: NamedSessionInfo) -> str:
    """A session in one line, without its name."""
    tenant = f", tenant {cleaned(info.tenant)}" if info.tenant else ""
    owner = f"held by {cleaned(info.owner)}" if info.owner else "not live on a worker"
    calls = _counted(info.executions, "execution")
    waits = f", {_counted(info.unfinished, 'call')} unfinished" if info.unfinished else ""
    return f"profile {cleaned(info.profile)}{tenant}, {owner}, {calls}{waits}"


def session_details(info: NamedSessionInfo) -> str:
    """Everything that is known of a session, one fact in a line."""
    manifest = info.checkpoint
    rows = [
        ("session", cleaned(info.session_id)),
        ("profile", cleaned(info.profile)),
        ("tenant", cleaned(info.tenant) or "none"),
        ("owner", cleaned(info.owner) or "none: no worker has it now"),
        ("created", _time(info.created_at)),
        ("used", _time(info.used_at)),
        ("executions", f"{info.executions}, {info.cpu_ms / 1000:.2f} s of CPU"),
        ("runs", cleaned(info.begun_call) or "nothing"),
        ("waits", _counted(info.waiting, "call")),
        ("checkpoint", "none" if manifest is None else _checkpoint_line(manifest)),
    ]
    if info.is_closing:
        rows.append(("closing", "yes: it takes no more calls"))
    return table(rows)


def _checkpoint_fields(manifest: CheckpointManifest) -> dict[str, Any]:
    return {
        "at": manifest.at,
        "size": manifest.size,
        "saved": manifest.saved_count,
        "skipped": manifest.skipped_count,
    }


def _checkpoint_line(manifest: CheckpointManifest) -> str:
    names = _counted(manifest.saved_count, "name")
    missing = f", {manifest.skipped_count} could not be saved" if manifest.skipped_count else ""
    return f"{_time(manifest.at)}: {names}, {manifest.size} bytes{missing}"


def _time(at: float | None) -> str:
    if at is None:
        return "never"
    return datetime.fromtimestamp(at).astimezone().isoformat(" ", "seconds")


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def queued_json(queue: str, length: int | None) -> str:
    """A queue, with the fields `id` and `state` that executions have too."""
    return format_line({"id": None, "state": "queued", "queue": queue, "length": length})


def queued_line(lengths: dict[str, int | None]) -> str:
    """The lengths of the queues in one line."""
    queues = (
        f"{cleaned(queue)} {'unknown' if length is None else length}"
        for queue, length in lengths.items()
    )
    return f"queued: {', '.join(queues)}"
