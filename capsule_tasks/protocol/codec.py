"""Messages to frames and back. A frame is a body behind its length, a big-endian 32-bit number."""

from __future__ import annotations

import functools
import operator
import struct
from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from capsule_tasks.errors import BadFrame, FrameTooLarge
from capsule_tasks.protocol.messages import Message
from capsule_tasks.protocol.values import revive

Incoming = TypeVar("Incoming", bound=Message)

HEADER = 4
_read_size = struct.Struct(">I").unpack_from

_MAX_QUOTED = 200
"""Characters of a peer's text that errors and answers quote: the rest may be megabytes."""

_encoder = msgspec.msgpack.Encoder()


class _Envelope(msgspec.Struct):
    type: str = msgspec.field(name="t")
    id: str = ""


_envelope = msgspec.msgpack.Decoder(_Envelope)


def encode_frame(message: Message, ceiling: int) -> bytearray:
    """One frame ready to send; FrameTooLarge if it would be over the ceiling."""
    frame = bytearray(HEADER)
    _encoder.encode_into(message, frame, HEADER)
    size = len(frame) - HEADER
    if size > ceiling:
        raise FrameTooLarge(size, ceiling)
    frame[:HEADER] = size.to_bytes(HEADER, "big")
    return frame


class Unknown(NamedTuple):
    """A message of an unknown type, to be answered with `Unsupported`."""

    what: str
    id: str


def message_types(direction: type[Message]) -> list[type[Message]]:
    """The messages of one direction: its subclasses that have no subclasses in their module."""
    found: list[type[Message]] = []
    for kind in direction.__subclasses__():
        if kind.__module__ == Message.__module__:  # others are the receiver's own
            found += message_types(kind) or [kind]
    return found


@functools.cache
def decoder_of(direction: type[Message]) -> Callable[[memoryview], Any]:
    """The decoder of one direction, cached: the first takes most of a millisecond to make."""
    union = functools.reduce(operator.or_, message_types(direction))
    return msgspec.msgpack.Decoder(union, ext_hook=revive).decode


class FrameDecoder:
    """Turns bytes as they arrive into whole frame bodies; linear in the bytes.

    A length of zero or over the ceiling raises BadFrame before the body is waited for. After that
    the decoder refuses all bytes: nothing behind a bad length can be trusted.
    """

    def __init__(self, ceiling: int) -> None:
        self._ceiling = ceiling
        self._pending = bytearray()
        self._needed = HEADER
        self._is_broken = False

    @property
    def pending_bytes(self) -> int:
        """Bytes of a frame whose rest has not arrived."""
        return len(self._pending)

    def bodies(self, data: bytes) -> Iterator[memoryview]:
        """The bodies completed by `data`; each is valid until the next one is yielded."""
        if self._is_broken:
            raise BadFrame("the transport already carried a bad frame")
        source: bytes | bytearray = data
        if self._pending:
            self._pending += data
            if len(self._pending) < self._needed:
                return
            source = self._pending
        view = memoryview(source)
        position, end = 0, len(view)
        while end - position >= HEADER:
            size = self._size(view, position)
            if end - position < HEADER + size:
                break
            position += HEADER
            yield view[position : position + size]
            position += size
        if position < end or self._pending:
            self._store(view[position:])

    def _size(self, view: memoryview, position: int) -> int:
        size: int = _read_size(view, position)[0]
        if 0 < size <= self._ceiling:
            return size
        self._is_broken = True
        raise BadFrame(f"a frame claims {size} bytes; allowed are 1 to {self._ceiling}")

    def _store(self, rest: memoryview) -> None:
        self._pending = bytearray(rest)
        whole = HEADER
        if len(rest) >= HEADER:
            whole += int.from_bytes(rest[:HEADER], "big")
        self._needed = whole


class MessageDecoder(FrameDecoder, Generic[Incoming]):
    """Decodes the bytes of one channel into messages of one direction.

    A message of an unknown type becomes `Unknown`, so that a newer peer does no harm. Any other
    fault in a frame raises BadFrame, as do all bytes that are fed after it.
    """

    def __init__(self, direction: type[Incoming], ceiling: int) -> None:
        super().__init__(ceiling)
        self._known = {kind.__struct_config__.tag for kind in message_types(direction)}
        self._decode = decoder_of(direction)

    def feed(self, data: bytes) -> Iterator[Incoming | Unknown]:
        for body in self.bodies(data):
            try:
                message = self._decode(body)
            except Exception as fault:  # noqa: BLE001
                # Hostile bytes can raise whatever decoding, reviving or recursion can raise.
                yield self._unknown(body, fault)
            else:
                yield message

    def _unknown(self, body: memoryview, fault: Exception) -> Unknown:
        try:
            envelope = _envelope.decode(body)
        except Exception:  # noqa: BLE001 - as above
            raise self._broken("a frame holds no message", fault) from fault
        if envelope.type in self._known:
            raise self._broken(f"a malformed {envelope.type!r} message", fault) from fault
        return Unknown(envelope.type[:_MAX_QUOTED], envelope.id[:_MAX_QUOTED])

    def _broken(self, what: str, fault: Exception) -> BadFrame:
        self._is_broken = True
        return BadFrame(f"{what}: {str(fault)[:_MAX_QUOTED]}")
