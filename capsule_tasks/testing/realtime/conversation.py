"""The state of one connection: its settings, the items of its conversation, the user's audio."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from capsule_tasks.runs.records import Item
from capsule_tasks.testing.realtime.checks import Refused, check_item, check_session

_VAD: Mapping[str, Mapping[str, Any]] = {
    "server_vad": {
        "threshold": 0.5,
        "prefix_padding_ms": 300,
        "silence_duration_ms": 500,
        "idle_timeout_ms": None,
        "create_response": True,
        "interrupt_response": True,
    },
    "semantic_vad": {"eagerness": "auto", "create_response": True, "interrupt_response": True},
}
_LEAST_COMMIT_MS = 100


class SessionSettings:
    """The settings of a connection, as `session.update` changes them."""

    def __init__(self, session_id: str, model: str) -> None:
        pcm = {"type": "audio/pcm", "rate": 24000}
        self.wire: dict[str, Any] = {
            "id": session_id,
            "type": "realtime",
            "object": "realtime.session",
            "model": model,
            "output_modalities": ["audio"],
            "instructions": "You are a helpful assistant.",
            "tools": [],
            "tool_choice": "auto",
            "max_output_tokens": "inf",
            "tracing": None,
            "truncation": "auto",
            "prompt": None,
            "expires_at": 4_000_000_000,
            "include": None,
            "audio": {
                "input": {
                    "format": pcm,
                    "transcription": None,
                    "noise_reduction": None,
                    "turn_detection": {"type": "server_vad", **_VAD["server_vad"]},
                },
                "output": {"format": pcm, "voice": "marin", "speed": 1.0},
            },
        }
        self.has_spoken = False

    def update(self, given: Any) -> None:
        """Apply what a client asks for, all of it or nothing."""
        check_session(given)
        wire = {**self.wire, **given}
        if wire["model"] != self.wire["model"]:
            raise Refused("The model of a session cannot be changed.", param="session.model")
        sides = {}
        for side, old in self.wire["audio"].items():
            sides[side] = old | ((given.get("audio") or {}).get(side) or {})
        if detection := sides["input"]["turn_detection"]:
            sides["input"]["turn_detection"] = {**_VAD[detection["type"]], **detection}
        if self.has_spoken and sides["output"]["voice"] != self.wire["audio"]["output"]["voice"]:
            message = "Cannot update a conversation's voice if assistant audio is present."
            raise Refused(message, "cannot_update_voice", "session.audio.output.voice")
        self.wire = {**wire, "audio": sides}

    @property
    def turn_detection(self) -> Mapping[str, Any] | None:
        detection: Mapping[str, Any] | None = self.wire["audio"]["input"]["turn_detection"]
        return detection

    @property
    def is_transcribing(self) -> bool:
        return self.wire["audio"]["input"]["transcription"] is not None

    def bytes_per_ms(self, side: str) -> int:
        return 48 if self.wire["audio"][side]["format"]["type"] == "audio/pcm" else 8


class Conversation:
    """The items of a conversation in order, and the audio that is not committed yet."""

    def __init__(self, conversation_id: str) -> None:
        self.id = conversation_id
        self.items: list[Item] = []
        self.audio_ms: dict[str, float] = {}
        """How much audio was made, by the id of the model's item."""
        self.buffer = bytearray()
        self.heard_bytes = 0
        """The bytes of all audio of the user, committed or not."""

    def find(self, item_id: str, doing: str) -> Item:
        for item in self.items:
            if item["id"] == item_id:
                return item
        raise Refused(
            f"Error {doing} item: the item with id '{item_id}' does not exist.",
            f"item_{doing.removesuffix('ing')}e_invalid_item_id",
            "item_id",
        )

    def last_id(self) -> str | None:
        return self.items[-1]["id"] if self.items else None

    def create(self, given: Any, after: str | None, new_id: str) -> tuple[Item, str | None]:
        """Add an item of the client; returns it and the id of the item before it."""
        check_item(given)
        if given["type"] == "function_call_output" and not self._has_call(given["call_id"]):
            raise Refused(
                f"Tool call ID '{given['call_id']}' not found in conversation.",
                "invalid_tool_call_id",
                "item.call_id",
            )
        defaults = {"id": new_id, "object": "realtime.item", "status": "completed"}
        item = defaults | {name: value for name, value in given.items() if value is not None}
        if item["type"] == "function_call":
            item.setdefault("call_id", f"call_{new_id}")
        return item, self.add(item, after)

    def add(self, item: Item, after: str | None = None) -> str | None:
        """Add an item; returns the id of the item before it. `root` is before all items."""
        if any(other["id"] == item["id"] for other in self.items):
            raise Refused(
                f"Error adding item: the item with id '{item['id']}' already exists.",
                "item_create_duplicate_item_id",
                "item.id",
            )
        place = len(self.items)
        if after == "root":
            place = 0
        elif after is not None:
            ids = [other["id"] for other in self.items]
            if after not in ids:
                raise Refused(
                    f"Previous item with id '{after}' not found in conversation.",
                    "item_create_invalid_previous_item_id",
                    "previous_item_id",
                )
            place = ids.index(after) + 1
        self.items.insert(place, item)
        return self.items[place - 1]["id"] if place else None

    def delete(self, item_id: str) -> None:
        self.items.remove(self.find(item_id, "deleting"))

    def truncate(self, item_id: str, content_index: int, audio_end_ms: int) -> None:
        item = self.find(item_id, "truncating")
        parts = item.get("content") or []
        has_part = 0 <= content_index < len(parts)
        if item_id not in self.audio_ms or not has_part:
            raise Refused("Only model output audio messages can be truncated", param="item_id")
        length_ms = self.audio_ms[item_id]
        if not 0 <= audio_end_ms <= length_ms:
            raise Refused(
                f"Audio content of {length_ms:g}ms is already shorter than {audio_end_ms}ms",
                param="audio_end_ms",
            )
        self.audio_ms[item_id] = audio_end_ms
        parts[content_index].pop("transcript", None)

    def append_audio(self, data: bytes) -> None:
        self.buffer += data
        self.heard_bytes += len(data)

    def commit_audio(self, bytes_per_ms: int) -> None:
        if (length_ms := len(self.buffer) / bytes_per_ms) < _LEAST_COMMIT_MS:
            raise Refused(
                "Error committing input audio buffer: buffer too small. Expected at least "
                f"{_LEAST_COMMIT_MS}ms of audio, but buffer only has {length_ms:.2f}ms of audio.",
                "input_audio_buffer_commit_empty",
            )
        self.buffer.clear()

    def _has_call(self, call_id: str) -> bool:
        return any(
            item["type"] == "function_call" and item["call_id"] == call_id for item in self.items
        )
