"""The cost of a message in credit, which both sides count in the same way."""

from __future__ import annotations

from capsule_tasks.protocol.messages import (
    InputClosed,
    InputRequest,
    Message,
    Output,
    Progress,
    RunEvent,
)

OVERHEAD = 256
"""Counted for every message, so that many small ones cannot outgrow the window."""


def utf8_size(text: str) -> int:
    """Bytes of `text` in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


def message_cost(message: Message) -> int:
    """The bytes of credit that `message` uses."""
    if isinstance(message, Output):
        return OVERHEAD + utf8_size(message.data)
    if isinstance(message, InputRequest):
        return 2 * OVERHEAD + utf8_size(message.prompt)
    if isinstance(message, InputClosed):
        return 0  # its request has paid: a question is closed even without credit
    if isinstance(message, Progress):
        return OVERHEAD + utf8_size(message.note)
    if isinstance(message, RunEvent):
        return OVERHEAD + len(message.json)
    return OVERHEAD
