"""When a response may be asked for: the server makes one at a time.

The methods are told what happens, and return the messages that are to be written now. The server
makes responses by itself, too, after the user has spoken. So a `response.create` may cross a
`response.created` of another response; the server refuses it then, and it is sent again later.

| state | left by |
| --- | --- |
| free | a wish: its `response.create` is sent; a response of the server's own begins |
| requested | `response.created`; the refusal of the `response.create` |
| active | `response.done`; a cancel |
| cancelling | `response.done`; the refusal of the `response.cancel` |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import count
from typing import Any, Literal

Message = dict[str, Any]
Wish = Mapping[str, Any] | None
"""The fields of a `response.create` of the user's own; None for a plain one."""

FREE_CHOICE: Wish = {"response": {"tool_choice": "auto"}}
"""The wish for a response in which the model may call a tool or not, whatever the settings say."""

_OWN = (None, FREE_CHOICE)
"""Wishes of which several are one. A plain one counts more: the user has said something."""
_IS_BUSY = "conversation_already_has_active_response"
_NOTHING_TO_CANCEL = "response_cancel_not_active"
_REMEMBERED_CREATES = 4
"""The refusal of a `response.create` may come after the next one was sent, but not much later."""


class ResponseGate:
    """Decides when `response.create` and `response.cancel` are sent."""

    def __init__(self) -> None:
        self.state: Literal["free", "requested", "active", "cancelling"] = "free"
        self.response_id: str | None = None
        """The id of the active response, if the server has told it."""
        self._waiting: deque[Wish] = deque()
        self._sent: dict[str, Wish] = {}
        self._cancel_event_id: str | None = None
        self._is_unwanted = False
        """Whether the response that was requested is to be cancelled when it begins."""
        self._numbers = count(1)

    def wish(self, fields: Wish = None) -> list[Message]:
        """A response is wanted. A wish of our own is one with such a wish that still waits."""
        if not self._joins(-1, fields):
            self._waiting.append(fields)
        return self._next()

    def created(self, response_id: str | None) -> list[Message]:
        """A response has begun."""
        is_unwanted, self._is_unwanted = self._is_unwanted, False
        self.state, self.response_id = "active", response_id
        return self.cancel() if is_unwanted else []

    def done(self, response_id: str | None) -> list[Message]:
        """A response has ended."""
        if None in {response_id, self.response_id} or response_id == self.response_id:
            self.state, self.response_id = "free", None
        return self._next()

    def cancel(self, response_id: str | None = None) -> list[Message]:
        """A response is not wanted any more; None for the one that is being made, or begins."""
        if self.state == "requested" and response_id is None:
            self._is_unwanted = True
        if self.state != "active" or (response_id or self.response_id) != self.response_id:
            return []
        self.state = "cancelling"
        self._cancel_event_id = f"cancel_{next(self._numbers)}"
        message = {"type": "response.cancel", "event_id": self._cancel_event_id}
        return [
            message if self.response_id is None else message | {"response_id": self.response_id}
        ]

    def refused(
        self, event_id: str | None, code: str | None, text: str
    ) -> tuple[bool, list[Message]]:
        """The server reports an error; whether nobody else has to know of it."""
        if event_id is not None and event_id == self._cancel_event_id:
            return self._cancel_refused(code)
        if event_id is None and self.state == "requested" and _is_about_create(code, text):
            event_id = next(reversed(self._sent), None)
        if event_id is None or event_id not in self._sent:
            return False, []
        is_awaited = self.state == "requested" and event_id == next(reversed(self._sent))
        wish = self._sent.pop(event_id)
        if code == _IS_BUSY and not self._joins(0, wish):
            self._waiting.appendleft(wish)
        if is_awaited:
            # Busy means: with a response that the server has not told us of.
            self.state = "active" if code == _IS_BUSY else "free"
            self._is_unwanted = False
        return code == _IS_BUSY, self._next()

    def _cancel_refused(self, code: str | None) -> tuple[bool, list[Message]]:
        self._cancel_event_id = None
        is_over = code == _NOTHING_TO_CANCEL
        if self.state != "cancelling":
            return is_over, []
        if is_over:
            return True, self.done(self.response_id)
        self.state = "active"
        return False, []

    def _joins(self, place: int, wish: Wish) -> bool:
        """Whether a wish has become one with the wish that waits in a place."""
        if not self._waiting or wish not in _OWN or self._waiting[place] not in _OWN:
            return False
        self._waiting[place] = self._waiting[place] and wish
        return True

    def _next(self) -> list[Message]:
        if self.state != "free" or not self._waiting:
            return []
        self.state = "requested"
        wish = self._waiting.popleft()
        event_id = str((wish or {}).get("event_id") or f"create_{next(self._numbers)}")
        self._sent[event_id] = wish
        if len(self._sent) > _REMEMBERED_CREATES:
            del self._sent[next(iter(self._sent))]
        return [{**(wish or {}), "type": "response.create", "event_id": event_id}]


def _is_about_create(code: str | None, text: str) -> bool:
    return code in {_IS_BUSY, "bad_response_create"} or "response.create" in text
