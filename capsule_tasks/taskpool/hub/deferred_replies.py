"""Remote commands whose answer comes later, so that the hub thread does not wait."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from kombu.pidbox import Node

log = logging.getLogger("capsule_tasks.taskpool")


class DeferredReply:
    """Returned by a command instead of its answer; call `give` once, on the hub thread."""

    def __init__(self) -> None:
        self._reply_with: Callable[[Any], object] | None = None

    def give(self, answer: Any) -> None:
        if self._reply_with is not None:
            self._reply_with(answer)

    def then(self, reply: Callable[[Any], object]) -> None:
        self._reply_with = reply


class DeferredReplyNode(Node):
    """A worker's mailbox that replies when a deferred answer is given."""

    def reply(
        self, data: Any, exchange: Any, routing_key: Any, ticket: Any, **options: Any
    ) -> None:
        reply = partial(self._reply, exchange, routing_key, ticket, options)
        answer = data.get(self.hostname)
        if isinstance(answer, DeferredReply):
            answer.then(reply)
        else:
            reply(answer)

    def _reply(
        self, exchange: Any, routing_key: Any, ticket: Any, options: Any, answer: Any
    ) -> None:
        super().reply({self.hostname: answer}, exchange, routing_key, ticket, **options)
