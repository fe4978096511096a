"""One response: the events in which the server tells of it, until it ends or is cancelled."""

from __future__ import annotations

import asyncio
import base64
from typing import Any, Literal, Protocol

from capsule_tasks.runs.records import Item
from capsule_tasks.testing.realtime.conversation import Conversation, SessionSettings
from capsule_tasks.testing.realtime.script import (
    AUDIO_MS_PER_CHAR,
    Answer,
    Hold,
    Message,
    chunks,
    spread,
)

StopReason = Literal["client_cancelled", "turn_detected"]


class Speaker(Protocol):
    """The connection over which a response is told."""

    conversation: Conversation
    settings: SessionSettings

    async def send(self, event: dict[str, Any]) -> None: ...

    def new_id(self, prefix: str) -> str: ...


class LiveResponse:
    """A response that is being made. An item that is cut short ends with what was said of it."""

    def __init__(self, speaker: Speaker) -> None:
        self._speaker = speaker
        self._answer = Answer()
        self.id = speaker.new_id("resp")
        self._output: list[Item] = []
        self._before: str | None = None
        """The id of the item before the one that is being made."""
        self._stop_reason: StopReason | None = None
        self._stopped = asyncio.Event()

    def stop(self, reason: StopReason) -> None:
        """Cut the response short at its next delta; `response.done` follows."""
        if not self._stopped.is_set():
            self._stop_reason = reason
            self._stopped.set()

    async def run(self, answer: Answer) -> None:
        self._answer = answer
        await self._send("response.created", response=self._resource("in_progress"))
        for part in answer.parts():
            if self._stopped.is_set():
                break
            if isinstance(part, Hold):
                await self._hold(part)
            elif isinstance(part, Message):
                await self._message(part)
            else:
                await self._call(part)

    async def done(self) -> None:
        """Tell the end, once nothing else counts the response as active."""
        answer = self._answer
        if self._stop_reason is not None:
            resource = self._resource("cancelled")
            resource["status_details"] = {"type": "cancelled", "reason": self._stop_reason}
        else:
            resource = self._resource(answer.status)
            if answer.status != "completed":
                details = {"type": answer.status, "reason": answer.reason, "error": answer.error}
                given = {name: value for name, value in details.items() if value is not None}
                resource["status_details"] = given
        if answer.usage is not None:
            resource["usage"] = dict(answer.usage)
        await self._send("response.done", response=resource)

    async def _message(self, message: Message) -> None:
        is_audio = message.audio is not None
        settings = self._speaker.settings
        bytes_per_ms = settings.bytes_per_ms("output")
        item = await self._open({"type": "message", "role": "assistant", "content": []})
        place = {**self._place(item), "content_index": 0}
        kind, field = ("audio", "transcript") if is_audio else ("text", "text")
        text_event = f"response.output_{'audio_transcript' if is_audio else 'text'}"
        part = {"type": f"output_{kind}", field: ""}
        item["content"].append(part)
        lengths = self._speaker.conversation.audio_ms
        if is_audio:
            lengths[item["id"]] = 0
            settings.has_spoken = True

        await self._send("response.content_part.added", **place, part={"type": kind, field: ""})
        deltas = list(message.deltas())
        audio = message.audio
        if audio == "silence":
            audio = bytes(len(message.text) * AUDIO_MS_PER_CHAR * bytes_per_ms)
        texts = sum(isinstance(delta, str) for delta in deltas)
        sounds = spread(audio, texts) if audio and texts else iter(())
        for delta in deltas:
            if isinstance(delta, Hold):
                await self._hold(delta)
                continue
            if self._stopped.is_set():
                break
            part[field] = part.get(field, "") + delta
            await self._send(f"{text_event}.delta", **place, delta=delta)
            if sound := next(sounds, b""):
                lengths[item["id"]] += len(sound) / bytes_per_ms
                encoded = base64.b64encode(sound).decode()
                await self._send("response.output_audio.delta", **place, delta=encoded)
        if is_audio:
            await self._send("response.output_audio.done", **place)
        said = part.get(field, "")  # a truncation has removed it
        await self._send(f"{text_event}.done", **place, **{field: said})
        await self._send("response.content_part.done", **place, part={"type": kind, field: said})
        await self._close(item)

    async def _call(self, scripted: Item) -> None:
        item = await self._open({**scripted, "arguments": ""})
        place = {**self._place(item), "call_id": item["call_id"]}
        event = "response.function_call_arguments"
        for delta in chunks(scripted["arguments"]):
            if self._stopped.is_set():
                break
            item["arguments"] += delta
            await self._send(f"{event}.delta", **place, delta=delta)
        told = {"name": item["name"], "arguments": item["arguments"]}
        await self._send(f"{event}.done", **place, **told)
        await self._close(item)

    async def _hold(self, hold: Hold) -> None:
        """Wait until the test lets the response go on, or the response is stopped."""
        waits = [asyncio.ensure_future(wait) for wait in (hold.wait(), self._stopped.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _open(self, fields: Item) -> Item:
        new = {"id": self._speaker.new_id("item"), "object": "realtime.item"}
        item = new | fields | {"status": "in_progress"}
        if item["type"] == "function_call":
            item.setdefault("call_id", self._speaker.new_id("call"))
        self._output.append(item)
        before = self._speaker.conversation.add(item)
        told = {**item, "content": []} if "content" in item else dict(item)
        index = {"output_index": len(self._output) - 1}
        await self._send("response.output_item.added", response_id=self.id, item=told, **index)
        await self._send("conversation.item.added", previous_item_id=before, item=told)
        self._before = before
        return item

    async def _close(self, item: Item) -> None:
        item["status"] = "incomplete" if self._stopped.is_set() else "completed"
        index = {"output_index": len(self._output) - 1}
        await self._send("conversation.item.done", previous_item_id=self._before, item=item)
        await self._send("response.output_item.done", response_id=self.id, item=item, **index)

    def _place(self, item: Item) -> dict[str, Any]:
        index = len(self._output) - 1
        return {"response_id": self.id, "item_id": item["id"], "output_index": index}

    def _resource(self, status: str) -> dict[str, Any]:
        wire = self._speaker.settings.wire
        return {
            "id": self.id,
            "object": "realtime.response",
            "status": status,
            "status_details": None,
            "output": self._output if status != "in_progress" else [],
            "conversation_id": self._speaker.conversation.id,
            "output_modalities": wire["output_modalities"],
            "max_output_tokens": wire["max_output_tokens"],
            "metadata": None,
            "usage": None,
        }

    async def _send(self, kind: str, **fields: Any) -> None:
        await self._speaker.send({"type": kind, **fields})
