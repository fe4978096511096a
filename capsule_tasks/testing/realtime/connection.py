"""One connection of a client: its messages, and what the server answers."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from inspect import isawaitable
from itertools import count
from typing import TYPE_CHECKING, Any

import msgspec
from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed

from capsule_tasks.runs.records import Item
from capsule_tasks.testing.realtime.checks import Refused, check_message, check_response, decoded
from capsule_tasks.testing.realtime.conversation import Conversation, SessionSettings
from capsule_tasks.testing.realtime.response import LiveResponse, StopReason
from capsule_tasks.testing.realtime.script import Scripted, as_answer

if TYPE_CHECKING:
    from capsule_tasks.testing.realtime.server import RealtimeServer

Message = dict[str, Any]
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: a closed socket resets its connection."""


class RealtimeConnection:
    """A connection of a client, with which a test acts as the server."""

    def __init__(
        self,
        server: RealtimeServer,
        websocket: ServerConnection,
        number: int,
        next_reply: Callable[[], Scripted],
        model: str,
    ) -> None:
        self._server = server
        self._websocket = websocket
        self._number = number
        self._ids = count(1)
        self._next_reply = next_reply
        self._tasks: set[asyncio.Task[None]] = set()
        self._response: LiveResponse | None = None
        """The active response."""
        self._responding: asyncio.Task[None] | None = None
        self._may_read = asyncio.Event()
        self._may_read.set()
        self._speech: tuple[str, int] | None = None
        """The id of the item that the user's speech becomes, and where in ms the speech began."""
        self._handlers: Mapping[str, Callable[[Message], Awaitable[None]]] = {
            "session.update": self._update_session,
            "conversation.item.create": self._create_item,
            "conversation.item.retrieve": self._retrieve_item,
            "conversation.item.delete": self._delete_item,
            "conversation.item.truncate": self._truncate_item,
            "input_audio_buffer.append": self._append_audio,
            "input_audio_buffer.commit": self._commit_audio,
            "input_audio_buffer.clear": self._clear_audio,
            "response.create": self._create_response,
            "response.cancel": self._cancel_response,
        }
        self.conversation = Conversation(self.new_id("conv"))
        self.settings = SessionSettings(self.new_id("sess"), model)
        self.received: list[Message] = []
        """The messages of the client, in order."""
        self.headers = {} if websocket.request is None else dict(websocket.request.headers.items())
        """The headers of the client's handshake."""
        self.path = "" if websocket.request is None else websocket.request.path
        self.is_open = True
        self.close_code: int | None = None
        """With which code the connection was closed; None while it is open."""

    # --- what a test does as the server ---

    async def send(self, event: Mapping[str, Any] | bytes) -> None:
        """Send an event, with an `event_id` if it has none; or bytes as they are, as text."""
        if not isinstance(event, bytes):
            event = msgspec.json.encode({"event_id": self.new_id("event"), **event})
        await self._websocket.send(event, text=True)

    async def start_speaking(self, at_ms: int | None = None) -> str:
        """The server detects that the user speaks, which stops a response, unless settings differ.

        Returns the id of the item that the speech becomes. `at_ms` is counted from the beginning
        of the user's audio; None for its end.
        """
        heard_ms = self.conversation.heard_bytes // self.settings.bytes_per_ms("input")
        start_ms = heard_ms if at_ms is None else at_ms
        item_id = self.new_id("item")
        self._speech = item_id, start_ms
        kind = "input_audio_buffer.speech_started"
        await self.send({"type": kind, "item_id": item_id, "audio_start_ms": start_ms})
        detection = self.settings.turn_detection
        if detection is not None and detection["interrupt_response"]:
            await self.stop_response("turn_detected")
        return item_id

    async def stop_speaking(self, transcript: str | None = None, audio_ms: int = 1000) -> str:
        """The server detects the end of the user's turn: the item, its transcript, a response.

        Without a `transcript` there is none until `transcribe` is called, or at all if the session
        asks for none. Returns the id of the item.
        """
        if self._speech is None:
            raise AssertionError("the user does not speak; call start_speaking first")
        (item_id, start_ms), self._speech = self._speech, None
        end_ms = start_ms + audio_ms
        self.conversation.buffer.clear()
        kind = "input_audio_buffer.speech_stopped"
        await self.send({"type": kind, "item_id": item_id, "audio_end_ms": end_ms})
        await self._committed(item_id, transcript)
        detection = self.settings.turn_detection
        if detection is not None and detection["create_response"] and self._response is None:
            self._start_response()
        return item_id

    async def user_speaks(self, transcript: str | None = None, audio_ms: int = 1000) -> str:
        """The user speaks, from the beginning of the turn to its end."""
        await self.start_speaking()
        return await self.stop_speaking(transcript, audio_ms)

    async def transcribe(self, item_id: str, transcript: str) -> None:
        """Send the transcript of an item of the user."""
        item = self.conversation.find(item_id, "transcribing")
        item["content"][0]["transcript"] = transcript
        usage = {"type": "duration", "seconds": 1}
        told = {"transcript": transcript, "usage": usage}
        await self._transcription(item_id, "completed", **told)

    async def fail_transcription(self, item_id: str, message: str = "inaudible") -> None:
        error = {"type": "transcription_error", "code": "audio_unintelligible", "message": message}
        await self._transcription(item_id, "failed", error=error)

    async def input_times_out(self, silent_ms: int = 5000) -> str:
        """The user was silent for as long as the turn detection allows; a response follows."""
        item_id = self.new_id("item")
        end_ms = self.conversation.heard_bytes // self.settings.bytes_per_ms("input")
        event = {"type": "input_audio_buffer.timeout_triggered", "item_id": item_id}
        start_ms = max(0, end_ms - silent_ms)
        await self.send({**event, "audio_start_ms": start_ms, "audio_end_ms": end_ms})
        await self._committed(item_id, None)
        if self._response is None:
            self._start_response()
        return item_id

    async def stop_response(self, reason: StopReason = "client_cancelled") -> None:
        """Cut the active response short, if there is one, and wait until that was told."""
        if self._response is not None and self._responding is not None:
            self._response.stop(reason)
            await asyncio.wait([self._responding])

    def pause_reading(self) -> None:
        """Read nothing more, so that the client's writes wait once the buffers are full."""
        self._may_read.clear()
        self._websocket.transport.pause_reading()

    def resume_reading(self) -> None:
        self._websocket.transport.resume_reading()
        self._may_read.set()

    async def close(self, code: int = 1000, reason: str = "") -> None:
        """Close the connection in the regular way, with the code."""
        await self._websocket.close(code, reason)

    def abort(self) -> None:
        """Reset the TCP connection, as if the server had died."""
        raw = self._websocket.transport.get_extra_info("socket")
        if raw.fileno() != -1:  # it is closed already
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._websocket.transport.abort()

    # --- the connection itself ---

    async def serve(self) -> None:
        """Answer the client's messages until the connection ends."""
        try:
            await self.send({"type": "session.created", "session": self.settings.wire})
            while True:
                data = await self._websocket.recv(decode=False)
                await self._may_read.wait()
                await self._take(data)
        except ConnectionClosed:
            pass
        except Exception as error:  # noqa: BLE001 - the test sees it when the server ends
            await self._fail(error)
        finally:
            self.is_open = False
            self.close_code = self._websocket.close_code
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._server.changed()

    def new_id(self, prefix: str) -> str:
        return f"{prefix}_{self._number}_{next(self._ids)}"

    async def _take(self, data: bytes) -> None:
        try:
            message = msgspec.json.decode(data)
        except msgspec.DecodeError as error:
            await self._refuse(Refused(f"Invalid JSON: {error}.", "invalid_json"), None)
            return
        if not isinstance(message, dict):
            message = {"type": None, "data": message}
        self.received.append(message)
        self._server.took(message)
        rule = self._server.rule_for(message)
        if rule is None:
            await self._answer(message)
        elif rule.refusal is not None:
            await self.send({"type": "error", "error": rule.refusal.error(message.get("event_id"))})
        elif rule.until is not None:
            self._start(self._answer_later(message, rule.until))

    async def _answer_later(self, message: Message, until: asyncio.Event) -> None:
        await until.wait()
        await self._answer(message)

    async def _answer(self, message: Message) -> None:
        try:
            check_message(message)
            await self._handlers[message["type"]](message)
        except Refused as refused:
            await self._refuse(refused, message)

    async def _refuse(self, refused: Refused, message: Message | None) -> None:
        error = refused.error(None if message is None else message.get("event_id"))
        self._server.refused(error, message)
        await self.send({"type": "error", "error": error})

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(self._guarded(work))
        self._tasks.add(task)
        task.add_done_callback(lambda _: work.close())  # the task may be cancelled before it begins
        task.add_done_callback(self._tasks.discard)
        return task

    async def _guarded(self, work: Awaitable[None]) -> None:
        try:
            await work
        except ConnectionClosed:
            pass
        except Exception as error:  # noqa: BLE001 - the test sees it when the server ends
            await self._fail(error)

    async def _fail(self, error: Exception) -> None:
        """Let the test know, and let the client fail, too, as it would wait for an answer."""
        self._server.failed(error)
        await self._websocket.close(1011, "the script has failed")

    # --- answers to messages ---

    async def _update_session(self, message: Message) -> None:
        self.settings.update(message["session"])
        await self.send({"type": "session.updated", "session": self.settings.wire})

    async def _create_item(self, message: Message) -> None:
        item, before = self.conversation.create(
            message["item"], message.get("previous_item_id"), self.new_id("item")
        )
        await self._tell_item(item, before)

    async def _retrieve_item(self, message: Message) -> None:
        item = self.conversation.find(message["item_id"], "retrieving")
        await self.send({"type": "conversation.item.retrieved", "item": item})

    async def _delete_item(self, message: Message) -> None:
        self.conversation.delete(message["item_id"])
        await self.send({"type": "conversation.item.deleted", "item_id": message["item_id"]})

    async def _truncate_item(self, message: Message) -> None:
        names = ("item_id", "content_index", "audio_end_ms")
        cut = {name: message[name] for name in names}
        self.conversation.truncate(**cut)
        await self.send({"type": "conversation.item.truncated", **cut})

    async def _append_audio(self, message: Message) -> None:
        self.conversation.append_audio(decoded(message["audio"]))

    async def _commit_audio(self, _: Message) -> None:
        self.conversation.commit_audio(self.settings.bytes_per_ms("input"))
        await self._committed(self.new_id("item"), self._server.next_transcript())

    async def _clear_audio(self, _: Message) -> None:
        self.conversation.buffer.clear()
        await self.send({"type": "input_audio_buffer.cleared"})

    async def _create_response(self, message: Message) -> None:
        if message.get("response") is not None:
            check_response(message["response"])
        if self._response is not None:
            raise Refused(
                f"Conversation already has an active response in progress: {self._response.id}. "
                "Wait until the response is finished before creating a new one.",
                "conversation_already_has_active_response",
            )
        self._start_response()

    async def _cancel_response(self, message: Message) -> None:
        wanted = message.get("response_id")
        if self._response is None or wanted not in (None, self._response.id):
            raise Refused(
                "Cancellation failed: no active response found", "response_cancel_not_active"
            )
        self._response.stop("client_cancelled")

    # --- what several answers consist of ---

    async def _tell_item(self, item: Item, before: str | None) -> None:
        for event in ("added", "done"):
            kind = f"conversation.item.{event}"
            await self.send({"type": kind, "previous_item_id": before, "item": item})

    async def _committed(self, item_id: str, transcript: str | Exception | None) -> None:
        content = [{"type": "input_audio", "transcript": None}]
        item: Item = {"id": item_id, "object": "realtime.item", "type": "message"}
        item |= {"role": "user", "status": "completed", "content": content}
        before = self.conversation.add(item)
        kind = "input_audio_buffer.committed"
        await self.send({"type": kind, "previous_item_id": before, "item_id": item_id})
        await self._tell_item(item, before)
        if self.settings.is_transcribing and transcript is not None:
            if isinstance(transcript, Exception):
                await self.fail_transcription(item_id, str(transcript))
            else:
                await self.transcribe(item_id, transcript)

    async def _transcription(self, item_id: str, ending: str, **fields: Any) -> None:
        kind = f"conversation.item.input_audio_transcription.{ending}"
        await self.send({"type": kind, "item_id": item_id, "content_index": 0, **fields})

    def _start_response(self) -> None:
        """Take the script's next reply; the response is active from this moment on."""
        try:
            scripted = self._next_reply()
        except (StopIteration, IndexError):
            asked = self.received[-1] if self.received else None
            raise AssertionError(
                f"the script has no more replies, and a response was asked for; last message: "
                f"{asked!r}"
            ) from None
        self._response = LiveResponse(self)
        self._responding = self._start(self._respond(self._response, scripted))

    async def _respond(self, response: LiveResponse, scripted: Scripted) -> None:
        try:
            if callable(scripted):
                scripted = scripted(self)
            if isawaitable(scripted):
                scripted = await scripted
            await response.run(as_answer(scripted))
        finally:
            self._response = None
        await response.done()
        await self.send({"type": "rate_limits.updated", "rate_limits": []})
        self._server.changed()
