"""Whoever is told of the events of a model, and the pauses that they ask for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from capsule_tasks.realtime.model import Listener, ModelEvent, ServerEvent

_log = logging.getLogger(__name__)


class Listeners:
    """The listeners of a model."""

    def __init__(self) -> None:
        self._all: tuple[Listener, ...] = ()
        self._of_messages: tuple[Listener, ...] = ()
        """Those that want each message of the server."""
        self.pauses: list[asyncio.Future[None]] = []
        """The pauses that must end before the next message is read."""

    @property
    def has_any(self) -> bool:
        """Whether anybody listens."""
        return bool(self._all)

    def add(self, listener: Listener, *, server_events: bool) -> None:
        self.remove(listener)
        self._all = (*self._all, listener)
        if server_events:
            self._of_messages = (*self._of_messages, listener)

    def remove(self, listener: Listener) -> None:
        self._all = tuple(each for each in self._all if each is not listener)
        self._of_messages = tuple(each for each in self._of_messages if each is not listener)

    def tell(self, event: ModelEvent) -> None:
        if type(event) is ServerEvent:  # of a type that is not known; the others have had it
            self._tell([each for each in self._all if each not in self._of_messages], event)
        else:
            self._tell(self._all, event)

    def tell_message(self, raw: bytes) -> None:
        """Tell a message of the server to those that want each of them."""
        if self._of_messages:
            self._tell(self._of_messages, ServerEvent(raw))

    def _tell(self, listeners: Iterable[Listener], event: ModelEvent) -> None:
        for listener in listeners:
            try:
                pause = listener.on_event(event)
            except Exception:  # noqa: BLE001 - it must not end the conversation, nor keep others from the event
                _log.exception("A listener of a realtime model failed at %s", event.type)
            else:
                if pause is not None:
                    self.pauses.append(asyncio.ensure_future(pause))

    async def pause(self) -> None:
        """Wait until all listeners can take more events."""
        await asyncio.wait(self.pauses)
        self.pauses = [pause for pause in self.pauses if not pause.done()]

    def end_pauses(self) -> None:
        for pause in self.pauses:
            pause.cancel()
