"""Writes kombu's deliveries and acknowledgements to Redis without a round trip for each.

The two calls that kombu waits for are more than half of what a short task costs a worker. Here a
delivery is sent and its answer is read later; an acknowledgement goes with the next delivery, or
two milliseconds later. If the worker is killed in between, the message is redelivered, as if the
worker had been killed before. After a lost connection, what was not confirmed is sent on the next
one.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from kombu.transport import virtual
from kombu.utils.json import dumps

from capsule_tasks.client.task import mixed
from capsule_tasks.errors import StorageError, StorageUnavailable
from capsule_tasks.storage.connections.faults import FAULTS, to_storage_error
from capsule_tasks.storage.keys import renewal_marks
from capsule_tasks.storage.stock_redis.unacked_writer import UnackedWriter

log = logging.getLogger("capsule_tasks.taskpool")

_TIMEOUT_S = 0.002
"""How long an acknowledgement waits for a delivery, and at first for an answer."""
_MAX_TIMEOUT_S = 1.0
_WARN_EVERY_S = 30.0
_LATER = "when its visibility timeout is over"


class BatchedAcks:
    """The batch of one worker, on the hub thread; nothing fails when Redis does not answer.

    The batch outlives connections: tasks of a lost connection are acknowledged on the next.
    """

    def __init__(self) -> None:
        self._writer: Any = None
        self._hub: Any = None
        self._is_planned = False
        self._patience_s = _TIMEOUT_S
        self._warned_at = -_WARN_EVERY_S

    def follow(self, qos: Any, hub: Any, *, has_marks: bool) -> None:
        """Write over the channel of `qos` from now on, which has had no message yet."""
        before, self._writer = self._writer, UnackedWriter(qos.channel, has_marks=has_marks)
        self._hub, self._is_planned = hub, False
        base = mixed(RenewalMarkQoS, qos.__class__) if has_marks else qos.__class__
        qos.__class__ = mixed(BatchedAckQoS, base)
        qos.acks = self
        if before is not None:
            self._writer.take_over(before)
            self.write()

    def hold(self, tag: str, message: str) -> None:
        self._writer.deliver(tag, message)
        self.write()

    def ack(self, tag: str) -> None:
        self._writer.ack(tag)
        if self._hub is None:
            self.write()
        else:
            self._plan()

    def write(self) -> None:
        """Send what was not sent yet."""
        self._make(self._writer.write)
        self._plan()

    def flush(self) -> None:
        """Write all and wait until it is confirmed, unless Redis does not answer."""
        if self._writer is not None and not self._writer.is_flushed:
            self._make(self._writer.flush)

    def stop(self) -> None:
        """Write the rest; idempotent."""
        self.flush()
        if self._writer is not None:
            self._writer.close()

    def _make(self, call: Any) -> None:
        try:
            call()
        except StorageError as error:
            self._patience_s = _MAX_TIMEOUT_S
            now = time.monotonic()
            if now - self._warned_at >= _WARN_EVERY_S:
                self._warned_at = now
                log.warning("unacknowledged messages are not recorded yet: %s", error)

    def _plan(self) -> None:
        """Check again soon, if anything is not confirmed."""
        if self._hub is not None and not self._is_planned and not self._writer.is_flushed:
            self._is_planned = True
            self._hub.call_later(self._patience_s, self._on_time)

    def _on_time(self) -> None:
        self._is_planned = False
        self._patience_s = min(2 * self._patience_s, _MAX_TIMEOUT_S)
        if self._writer.is_answered:
            self.write()
        else:
            self._plan()
        if self._writer.is_flushed:
            self._patience_s = _TIMEOUT_S


class BatchedAckQoS:
    """Mixed into kombu's QoS; the channels of one worker share a batch."""

    acks: BatchedAcks

    def append(self: Any, message: Any, delivery_tag: str) -> None:
        info = message.delivery_info
        stored = [message._raw, info["exchange"], info["routing_key"]]  # noqa: SLF001
        self.acks.hold(delivery_tag, dumps(stored))
        virtual.QoS.append(self, message, delivery_tag)

    def ack(self: Any, delivery_tag: str) -> None:
        self.acks.ack(delivery_tag)
        virtual.QoS.ack(self, delivery_tag)

    def reject(self: Any, delivery_tag: str, requeue: bool = False) -> None:
        if not requeue:
            self.ack(delivery_tag)
            return
        try:
            super().reject(delivery_tag, requeue=True)  # type: ignore[misc]
        except FAULTS as fault:
            refusal = to_storage_error(fault, was_sent=True)
            if isinstance(refusal, StorageUnavailable):
                raise
            log.warning("message cannot be requeued now; it is redelivered %s: %s", _LATER, refusal)
            self.leave_for_redelivery(delivery_tag)

    def leave_for_redelivery(self: Any, delivery_tag: str) -> None:
        """Abandon the message to redelivery: it stays recorded, and is not renewed any more."""
        virtual.QoS.ack(self, delivery_tag)

    def restore_by_tag(self: Any, tag: str, client: Any = None, leftmost: bool = False) -> None:
        """Flush first: kombu looks for the recorded delivery."""
        self.acks.flush()
        super().restore_by_tag(tag, client, leftmost)  # type: ignore[misc]


class RenewalMarkQoS:
    """Mixed into kombu's QoS: removes the mark of a message with its index entry."""

    def _remove_from_indices(self: Any, delivery_tag: str, pipe: Any = None) -> Any:
        pipe = super()._remove_from_indices(delivery_tag, pipe)  # type: ignore[misc]
        return pipe.zrem(renewal_marks(self.unacked_index_key), delivery_tag)


def leave_for_redelivery(message: Any) -> bool:
    """Have a message delivered again later; False if its broker does not do that."""
    leave_it = getattr(getattr(message.channel, "qos", None), "leave_for_redelivery", None)
    if leave_it is not None:
        leave_it(message.delivery_tag)
    return leave_it is not None
