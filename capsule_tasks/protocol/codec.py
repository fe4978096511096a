"""Messages to frames and back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from capsule_tasks.errors import BadFrame, FrameTooLarge
from capsule_tasks.protocol.framing import HEADER, FrameDecoder
from capsule_tasks.protocol.messages import Message
from capsule_tasks.protocol.values import revive

Incoming = TypeVar("Incoming", bound=Message)

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


@functools.cache
def decoder_of(union: Any) -> Callable[[memoryview], Any]:
    """The decoder of one direction, cached: the first takes most of a millisecond to make."""
    return msgspec.msgpack.Decoder(union, ext_hook=revive).decode


class MessageDecoder(Generic[Incoming]):
    """Decodes the bytes of one channel into messages of one direction.

    A message of an unknown type becomes `Unknown`, so that a newer peer does no harm. Any other
    fault in a frame raises BadFrame, as do all bytes that are fed after it.
    """

    def __init__(self, union: Any, ceiling: int) -> None:
        self._known = {member.__struct_config__.tag for member in union.__args__}
        self._decode = decoder_of(union)
        self._frames = FrameDecoder(ceiling)

    @property
    def pending_bytes(self) -> int:
        """Bytes of a frame that has not arrived whole."""
        return self._frames.pending_bytes

    def feed(self, data: bytes) -> Iterator[Incoming | Unknown]:
        for body in self._frames.feed(data):
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
        self._frames.refuse_all()
        return BadFrame(f"{what}: {str(fault)[:_MAX_QUOTED]}")
