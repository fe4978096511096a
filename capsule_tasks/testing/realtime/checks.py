"""What OpenAI's server refuses: messages with fields that it does not know, or that are wrong."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Mapping
from typing import Any

_ID_CHARS = 32
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")

MESSAGES: Mapping[str, tuple[str, ...]] = {
    "session.update": ("session",),
    "conversation.item.create": ("item", "previous_item_id?"),
    "conversation.item.retrieve": ("item_id",),
    "conversation.item.delete": ("item_id",),
    "conversation.item.truncate": ("item_id", "content_index", "audio_end_ms"),
    "input_audio_buffer.append": ("audio",),
    "input_audio_buffer.commit": (),
    "input_audio_buffer.clear": (),
    "response.create": ("response?",),
    "response.cancel": ("response_id?",),
}
"""The messages of clients, with their fields; those with a `?` may be missing."""

_ITEMS: Mapping[str, tuple[str, ...]] = {
    "message": ("role", "content"),
    "function_call": ("name", "arguments", "call_id?"),
    "function_call_output": ("call_id", "output"),
}
_PARTS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "user": {
        "input_text": ("text",),
        "input_audio": ("audio", "transcript?"),
        "input_image": ("image_url", "detail?"),
    },
    "system": {"input_text": ("text",)},
    "assistant": {"output_text": ("text",)},
}
"""The parts of messages by role. An assistant's audio cannot be created by a client."""


def _fields(names: str) -> tuple[str, ...]:
    return tuple(names.split())


_SESSION = _fields(
    "type audio? include? instructions? max_output_tokens? model? output_modalities? prompt? "
    "parallel_tool_calls? reasoning? tool_choice? tools? tracing? truncation?"
)
_AUDIO = {
    "input": _fields("format? transcription? noise_reduction? turn_detection?"),
    "output": _fields("format? voice? speed?"),
}
_TURN_DETECTION = {
    "server_vad": _fields(
        "type create_response? interrupt_response? idle_timeout_ms? prefix_padding_ms? "
        "silence_duration_ms? threshold?"
    ),
    "semantic_vad": _fields("type create_response? interrupt_response? eagerness?"),
}
_FORMATS = ("audio/pcm", "audio/pcmu", "audio/pcma")
_TOOL = _fields("type name description? parameters?")
_RESPONSE = _fields(
    "audio? conversation? input? instructions? max_output_tokens? metadata? output_modalities? "
    "parallel_tool_calls? prompt? reasoning? tool_choice? tools?"
)


class Refused(Exception):
    """A message that is answered with an `error`."""

    def __init__(
        self,
        message: str,
        code: str | None = "invalid_value",
        param: str | None = None,
        kind: str = "invalid_request_error",
    ) -> None:
        super().__init__(message)
        self.code, self.param, self.kind = code, param, kind

    def error(self, event_id: str | None) -> dict[str, Any]:
        return {
            "type": self.kind,
            "code": self.code,
            "message": str(self),
            "param": self.param,
            "event_id": event_id,
        }


def check_message(message: Any) -> None:
    if not isinstance(message, dict):
        raise Refused("Invalid JSON: expected an object.", "invalid_json")
    kind = str(message.get("type"))
    if kind not in MESSAGES:
        known = ", ".join(f"'{name}'" for name in MESSAGES)
        raise Refused(f"Invalid value: '{kind}'. Supported values are: {known}.", param="type")
    _check_fields(message, ("type", "event_id?", *MESSAGES[kind]), "")
    if message.get("event_id") is not None:
        _check_type(message, "event_id", str, "")
    for name in ("item_id", "audio"):
        if name in message:
            _check_type(message, name, str, "")
    for name in ("content_index", "audio_end_ms"):
        if name in message:
            _check_type(message, name, int, "")


def check_item(item: Any) -> None:
    _require(isinstance(item, dict), "item", "an object")
    kind = item.get("type")
    if kind not in _ITEMS:
        raise Refused(f"Invalid value: '{kind}' as the type of an item.", param="item.type")
    _check_fields(item, ("type", "id?", "object?", "status?", *_ITEMS[kind]), "item.")
    for name in ("id", "call_id"):
        if (value := item.get(name)) is not None:
            _check_type(item, name, str, "item.")
            if not 0 < len(value) <= _ID_CHARS:
                raise Refused(
                    f"Invalid 'item.{name}': expected a string of 1 to {_ID_CHARS} characters, but "
                    f"got one of {len(value)}.",
                    "string_above_max_length",
                    f"item.{name}",
                )
    if item.get("status") not in (None, "completed", "incomplete", "in_progress"):
        raise Refused(f"Invalid value: {item['status']!r}.", param="item.status")
    if kind == "message":
        _check_content(item)
    for name in ("name", "arguments", "output"):
        if name in item:
            _check_type(item, name, str, "item.")


def _check_content(item: dict[str, Any]) -> None:
    if (role := item["role"]) not in _PARTS:
        raise Refused(f"Invalid value: '{role}'.", param="item.role")
    _check_type(item, "content", list, "item.")
    for index, part in enumerate(item["content"]):
        where = f"item.content[{index}]"
        _require(isinstance(part, dict), where, "an object")
        if (kind := part.get("type")) not in _PARTS[role]:
            known = ", ".join(f"'{name}'" for name in _PARTS[role])
            raise Refused(
                f"Invalid value: '{kind}'. Supported values for a message of role '{role}' are: "
                f"{known}.",
                param=f"{where}.type",
            )
        _check_fields(part, ("type", *_PARTS[role][kind]), f"{where}.")
        if kind.endswith("_text"):
            _check_type(part, "text", str, f"{where}.")


def check_session(session: Any) -> None:
    _require(isinstance(session, dict), "session", "an object")
    _check_fields(session, _SESSION, "session.")
    if session["type"] != "realtime":
        raise Refused(f"Invalid value: {session['type']!r}.", param="session.type")
    audio = session.get("audio") or {}
    _check_fields(audio, [f"{name}?" for name in _AUDIO], "session.audio.")
    for side, fields in _AUDIO.items():
        if of_side := audio.get(side):
            _check_fields(of_side, fields, f"session.audio.{side}.")
            form = of_side.get("format")
            if form is not None and (
                not isinstance(form, dict)
                or form.get("type") not in _FORMATS
                or (form["type"] == "audio/pcm" and form.get("rate") not in (None, 24000))
            ):
                raise Refused(f"Invalid value: {form!r}.", param=f"session.audio.{side}.format")
    if detection := (audio.get("input") or {}).get("turn_detection"):
        where = "session.audio.input.turn_detection"
        if detection.get("type") not in _TURN_DETECTION:
            raise Refused(f"Invalid value: {detection.get('type')!r}.", param=f"{where}.type")
        _check_fields(detection, _TURN_DETECTION[detection["type"]], f"{where}.")
    if (modalities := session.get("output_modalities")) not in (None, ["text"], ["audio"]):
        raise Refused(f"Invalid modalities: {modalities!r}.", param="session.output_modalities")
    check_tools(session.get("tools") or (), session.get("tool_choice"), "session.")


def check_response(response: Any) -> None:
    _require(isinstance(response, dict), "response", "an object")
    _check_fields(response, _RESPONSE, "response.")
    if response.get("conversation", "auto") != "auto" or response.get("input") is not None:
        raise Refused("this test server makes no responses out of band", "unsupported")
    check_tools(response.get("tools") or (), response.get("tool_choice"), "response.")


def check_tools(tools: Iterable[Any], choice: Any, where: str) -> None:
    names = []
    for index, tool in enumerate(tools):
        place = f"{where}tools[{index}]"
        _require(isinstance(tool, dict), place, "an object")
        if tool.get("type") != "function":
            raise Refused(f"Invalid value: {tool.get('type')!r}.", param=f"{place}.type")
        _check_fields(tool, _TOOL, f"{place}.")
        if not _TOOL_NAME.fullmatch(str(tool["name"])):
            raise Refused(f"Invalid '{place}.name': {tool['name']!r}.", param=f"{place}.name")
        names.append(tool["name"])
    if len(set(names)) < len(names):
        raise Refused(f"Tool names must be unique: {names!r}.", param=f"{where}tools")
    if isinstance(choice, dict) and choice.get("type") == "function":
        _check_fields(choice, ("type", "name"), f"{where}tool_choice.")
    elif choice not in (None, "auto", "none", "required"):
        raise Refused(f"Invalid value: {choice!r}.", param=f"{where}tool_choice")


def decoded(audio: str) -> bytes:
    try:
        return base64.b64decode(audio, validate=True)
    except binascii.Error:
        raise Refused("Invalid 'audio': expected base64.", param="audio") from None


def _check_fields(given: Mapping[str, Any], fields: Iterable[str], where: str) -> None:
    known = {field.rstrip("?") for field in fields}
    for name in given:
        if name not in known:
            raise Refused(f"Unknown parameter: '{where}{name}'.", "unknown_parameter", where + name)
    for field in fields:
        if not field.endswith("?") and given.get(field) is None:
            raise Refused(
                f"Missing required parameter: '{where}{field}'.",
                "missing_required_parameter",
                where + field,
            )


def _check_type(given: Mapping[str, Any], name: str, kind: type, where: str) -> None:
    value = given[name]
    is_right = isinstance(value, kind) and not (kind is int and isinstance(value, bool))
    _require(is_right, where + name, kind.__name__)


def _require(is_right: bool, param: str, expected: str) -> None:
    if not is_right:
        raise Refused(f"Invalid type for '{param}': expected {expected}.", "invalid_type", param)
