"""Formats durable runs, the calls that they wait for, and their events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from typing import Any

import msgspec

from capsule_tasks.cli.terminal import cleaned
from capsule_tasks.cli.views import EventPrinter, format_line
from capsule_tasks.client import Event
from capsule_tasks.client.runs.info import RunInfo, WaitingCall
from capsule_tasks.protocol.messages import Output, RunEvent
from capsule_tasks.sessions.console.commands import table

_NAMES = {
    "message": "message_output_created",
    "function_call": "tool_called",
    "function_call_output": "tool_output",
}
"""Types of items, and the names under which openai-agents tells of them."""
_HIDDEN = (
    *("arguments_delta", "reasoning_delta", "refusal_delta", "tool_started", "usage"),
    *("raw_response_event", "run_parked"),
)
"""Events of a run that other events tell, too; `waits` tells what a parked run waits for."""
_MOST_SHOWN = 500
"""Characters of the arguments or the output of a call in the events of a run."""


def run_row(info: RunInfo) -> str:
    """One run of a list in one line."""
    since = _time(info.updated_at)
    waits = f", waits for {_counted(len(info.waiting), 'call')}" if info.waiting else ""
    turns = _counted(info.turn, "turn")
    agent = f"agent {cleaned(info.agent)}"
    return f"{cleaned(info.run_id)}: {agent}, {info.status} since {since}, {turns}{waits}"


def run_json(info: RunInfo) -> str:
    fields = msgspec.to_builtins(info)
    fields["usage"] = msgspec.structs.asdict(info.usage)
    return format_line({"id": fields.pop("run_id"), **fields})


def run_details(info: RunInfo) -> str:
    """Everything that is known of a run, one fact in a line."""
    usage = info.usage
    tokens = f"{usage.input_tokens} tokens in, {usage.output_tokens} out"
    used = f"{_counted(usage.requests, 'request')}, {tokens}, {usage.time_ms / 1000:.2f} s"
    rows = [
        ("run", cleaned(info.run_id)),
        ("agent", cleaned(info.agent)),
        ("session", cleaned(info.session_id)),
        ("status", info.status),
        ("turns", str(info.turn)),
        ("created", _time(info.created_at)),
        ("changed", _time(info.updated_at)),
        ("used", used),
    ]
    if not info.is_ended:
        rows.append(("next agent", cleaned(info.current_agent)))
        rows.append(("owner", cleaned(info.owner or "") or "none: no worker drives it now"))
    if info.cancelled_by:
        rows.append(("cancelled", f"by {cleaned(info.cancelled_by)}"))
    rows += [("waits for", _call(call)) for call in info.waiting]
    if info.failure is not None:
        why = f"{info.failure.kind}: {info.failure.type}: {info.failure.message}"
        rows.append(("failure", cleaned(why)))
    if info.status == "completed":
        rows.append(("output", cleaned(_plain(info.output))))
    return table(rows)


def call_row(call: WaitingCall) -> str:
    """A call that waits, in one line with its run."""
    return f"{cleaned(call.run_id)}: {_call(call)}, asked {_time(call.asked_at)}"


def call_json(call: WaitingCall) -> str:
    fields = msgspec.to_builtins(call)
    return format_line({"id": fields.pop("run_id"), **fields})


def _call(call: WaitingCall) -> str:
    to_settle = " may have been made, to be settled" if call.kind == "settle" else ""
    until = f", until {_time(call.expires_at)}" if call.expires_at is not None else ""
    may = f", for {cleaned(', '.join(call.may_decide))}" if call.may_decide is not None else ""
    what = f"{cleaned(call.tool)} {cleaned(call.arguments)}"
    return f"{cleaned(call.call_id)}{to_settle}: {what}, of {cleaned(call.agent)}{until}{may}"


class RunPrinter:
    """Prints what the agent says as it comes, and a line for each other event."""

    def __init__(self, printer: EventPrinter) -> None:
        self._printer = printer
        self._is_streamed = False
        """The present message was printed as it came, so not when it is complete."""

    def show(self, event: Event) -> None:
        message = event.message
        if not isinstance(message, RunEvent):
            self._printer.show(event)
            return
        if message.dropped_events:
            self._printer.line(f"-- {message.dropped_events} events were dropped here")
        data = message.data if isinstance(message.data, dict) else {}
        match message.kind:
            case "raw_response_event" if data.get("type") == "response.output_text.delta":
                self._say_piece(event, data.get("delta"))
            case "text_delta":
                self._say_piece(event, data.get("text"))
            case "run_item_stream_event":
                found = data.get("item")
                item: dict[str, Any] = found if isinstance(found, dict) else {}
                self._show_item(event, message.agent, str(data.get("name")), item)
            case "item":
                kind = str(data.get("type", "message"))
                self._show_item(event, message.agent, _NAMES.get(kind, kind), data)
            case kind:
                for line in _lines(kind, message.agent, data):
                    self._printer.line(f"-- {cleaned(line)}")

    def waits(self, info: RunInfo, command: Callable[..., str]) -> None:
        """Print the calls that a run waits for, each with the commands that answer it."""
        for call in info.waiting:
            self._printer.line(f"-- waits for {_call(call)}")
            words = ("settle",) if call.kind == "settle" else ("approve", "reject")
            for word in words:
                self._printer.line(f"-- {command('runs', word, info.run_id, call.call_id)}")

    def _show_item(self, event: Event, agent: str, kind: str, item: dict[str, Any]) -> None:
        about = _about(item)
        match kind:
            case "message_output_created":
                if not self._is_streamed:
                    self._say(event, _text_of(item))
                self._say(event, "\n")
                self._is_streamed = False
            case "tool_called":
                name = item.get("name") or item.get("type") or "a tool"
                arguments = cleaned(_shortened(_plain(item.get("arguments", ""))))
                self._printer.line(
                    f"-- {cleaned(agent)} calls {cleaned(str(name))} {arguments}: {about}"
                )
            case "tool_output":
                output = cleaned(_shortened(_plain(item.get("output"))))
                self._printer.line(f"-- {about} returned {output}")
            case "reasoning":
                pass
            case name:
                self._printer.line(f"-- {cleaned(name)} of {cleaned(agent)}")

    def _say_piece(self, event: Event, text: Any) -> None:
        self._say(event, str(text or ""))
        self._is_streamed = True

    def _say(self, event: Event, text: str) -> None:
        if text:
            self._printer.show(replace(event, message=Output(stream="stdout", data=text)))


def _lines(kind: str, agent: str, data: dict[str, Any]) -> list[str]:
    """The lines that tell of an event; none for one that other events tell, too."""
    about = _about(data)
    match kind:
        case "turn":
            return [f"turn {data.get('turn')}: {data.get('status')}"]
        case "guardrail":
            has_tripped = data.get("tripped") or data.get("behavior", "allow") != "allow"
            return [f"guardrail {data.get('name')} tripped"] if has_tripped else []
        case "attempt_discarded":
            return [f"{agent} begins its reply again"]
        case "tool_execution":
            return [f"{about} is execution {data.get('execution')}"]
        case "tool_text":
            return [f"{about}: {line}" for line in str(data.get("text", "")).splitlines()]
        case "tool_question":
            return [f"{about} asks {data.get('prompt')!r}"]
        case "tool_progress":
            total = f" of {data['total']:g}" if data.get("total") is not None else ""
            return [f"{about}: {data.get('done', 0):g}{total} {data.get('note', '')}".rstrip()]
    if kind in _HIDDEN:
        return []
    return [f"{kind}: {agent}" if agent else kind]


def _about(data: dict[str, Any]) -> str:
    """The id of the call, or of the item, that something is about."""
    return cleaned(str(data.get("call_id") or data.get("id") or ""))


def _text_of(item: dict[str, Any]) -> str:
    content = item.get("content")
    parts = content if isinstance(content, list) else []
    return "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))


def _plain(value: Any) -> str:
    """A value as text: a text as it is, others as JSON."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _shortened(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def _time(at: datetime) -> str:
    return at.astimezone().isoformat(" ", "seconds")


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
