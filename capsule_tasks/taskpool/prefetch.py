"""The prefetch counter: messages of coroutines are counted in addition to Celery's limit.

Celery counts up for each message with an ETA or a countdown, and down when its time has come. It
counts up to `worker_eta_task_limit` only, but always down: after more such messages than the limit,
the worker would prefetch a single message. Here a message that was not counted up is not counted
down.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

from celery.worker import state
from celery.worker.autoscale import Autoscaler
from kombu.common import QoS

from capsule_tasks.client.task import mixed


class Prefetch(QoS):
    """Celery's counter, with room beyond the limit."""

    def __init__(self, counter: Any) -> None:
        """Go on where `counter` is."""
        super().__init__(counter.callback, counter.value, counter.max_prefetch)
        self.prev = counter.prev
        self._not_counted = 0

    def increment_eventually(self, n: int = 1) -> int:
        with self._mutex:
            before = self.value
            super().increment_eventually(n)
            if before:
                self._not_counted += max(n, 0) - (self.value - before)
            return int(self.value)

    def decrement_eventually(self, n: int = 1) -> int:
        with self._mutex:
            forgiven = min(n, self._not_counted)
            self._not_counted -= forgiven
            return int(super().decrement_eventually(n - forgiven))

    def add_one(self) -> None:
        """Make room for one more message, without an ETA."""
        with self._mutex:
            if self.value:
                self.value += 1
                self._move_limit(1)

    def remove_one(self) -> None:
        """Undo one `add_one`."""
        with self._mutex:
            if self.value:
                self.value = max(1, self.value - 1)
                self._move_limit(-1)

    def _move_limit(self, n: int) -> None:
        if self.max_prefetch is not None:
            self.max_prefetch += n


class SlotScaler:
    """Mixed into the autoscaler: coroutines take no slot."""

    @property
    def qty(self: Any) -> int:
        return int(super().qty) - int(self.pool.coroutines)  # type: ignore[misc]


def count_coroutines_apart(consumer: Any) -> None:
    """Have a consumer that has just connected count coroutines apart."""
    consumer.qos = Prefetch(consumer.qos)
    channel_qos: Any = getattr(consumer.task_consumer.channel, "qos", None)
    if "can_consume" in getattr(channel_qos, "__dict__", {}):
        channel_qos.can_consume = MethodType(_within_slots(consumer), channel_qos)
    scaler: Any = getattr(consumer.controller, "autoscaler", None)
    if isinstance(scaler, Autoscaler):
        scaler.__class__ = mixed(SlotScaler, scaler.__class__)


def _within_slots(consumer: Any) -> Any:
    """Celery's check for `worker_disable_prefetch`: no more messages than free children."""

    def can_consume(qos: Any) -> bool:
        limit = getattr(consumer.controller, "max_concurrency", None) or consumer.pool.num_processes
        if len(state.reserved_requests) - consumer.pool.coroutines >= limit:
            return False
        return bool(type(qos).can_consume(qos))

    return can_consume
