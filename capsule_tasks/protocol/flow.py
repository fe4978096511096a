"""What a message costs of an execution's credit; both sides count alike."""

from __future__ import annotations

from capsule_tasks.protocol.messages import InputClosed, InputRequest, Message, Output, Progress

OVERHEAD = 256
"""Counted for every message, so that many small ones cannot outgrow the window."""


def utf8_size(text: str) -> int:
    """Bytes of `text` in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


def message_cost(message: Message) -> int:
    """Bytes of credit that `message` uses."""
    if isinstance(message, Output):
        return OVERHEAD + utf8_size(message.data)
    if isinstance(message, InputRequest):
        return 2 * OVERHEAD + utf8_size(message.prompt)
    if isinstance(message, InputClosed):
        return 0  # paid by its request: a question is closed also when there is no credit
    if isinstance(message, Progress):
        return OVERHEAD + utf8_size(message.note)
    return OVERHEAD
