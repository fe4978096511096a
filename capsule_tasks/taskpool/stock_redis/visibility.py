"""Renews the visibility time of this worker's messages, and requeues those of dead workers.

With a Redis broker, kombu notes when each message was delivered, and delivers it again once its
visibility timeout has passed, whether its worker lives or not. Here a thread with a connection of
its own renews that time for as long as the worker lives, so the timeout is how long a *dead*
worker is waited for, and long tasks and long ETAs need no longer one. It works while the hub thread
waits for the last tasks, too.

A timeout shorter than DEFAULT_VISIBILITY_S would harm workers that do not renew, since their long
tasks would be delivered twice. So under a short timeout each message is marked as renewed when it
is delivered, and a message without a mark is requeued after DEFAULT_VISIBILITY_S only.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from dataclasses import dataclass
from typing import Any

from celery.worker import state

from capsule_tasks.client.task import mixed
from capsule_tasks.errors import InvalidSetting, StorageDenied, StorageUnusable, reason_of
from capsule_tasks.storage.connections.faults import FAULTS, to_storage_error
from capsule_tasks.storage.keys import renewal_marks
from capsule_tasks.storage.scripts import Call
from capsule_tasks.storage.stock_redis.unacked import MAX_TAGS, Overdue, claim, claimed
from capsule_tasks.system.service import ThreadService
from capsule_tasks.taskpool.stock_redis.batched_acks import BatchedAcks, RenewalMarkQoS

log = logging.getLogger("capsule_tasks.taskpool")

DEFAULT_VISIBILITY_S = 3600.0
"""Kombu's own default, granted to workers that do not renew, whatever is configured here."""
_MIN_S = 1.0
_RENEW_AT_LEAST_EVERY_S = 2.5
"""Also under a long timeout: another worker of these queues may have a shorter one."""
_SWEEP_EVERY_S = 5.0
_BATCH_SIZE = 1000


@dataclass(frozen=True, eq=False)
class _Followed:
    """A connection of the consumer, and how its unacknowledged messages are renewed."""

    qos: Any
    source: Any
    options: dict[str, Any]
    overdue: Overdue
    renew_every_s: float


class VisibilityRenewal(ThreadService):
    """Renews and requeues for a consumer, from its first connection on."""

    thread_name = "capsule-visibility"

    def __init__(self, consumer: Any) -> None:
        super().__init__()
        self._consumer = consumer
        self._following = threading.Lock()
        self._followed: _Followed | None = None
        self._short_s: float | None = None
        self._acks = BatchedAcks()
        self._connection: Any = None
        self._channel: Any = None
        self._connected_for: _Followed | None = None
        self._next_sweep = 0.0
        self._next_renewal = 0.0
        self._is_refused = False

    def prepare(self, connection: Any) -> None:
        """Lengthen the timeout of kombu's own sweep, which first runs on connecting.

        InvalidSetting for a timeout that is too short.
        """
        short_s = protect_other_workers(connection)
        if short_s is not None:  # a connection that comes here again has the long timeout
            self._short_s = short_s

    def start(self) -> None:
        """Renew for the consumer, which has just connected and has no message yet.

        Called again after each reconnect. Does nothing for a broker without visibility timeouts.
        """
        qos: Any = getattr(getattr(self._consumer.task_consumer, "channel", None), "qos", None)
        if hasattr(qos, "unacked_index_key"):
            with self._following:
                if not self.stopping.is_set():
                    self._follow(qos)
            super().start()

    def _follow(self, qos: Any) -> None:
        source, short_s = self._consumer.connection, self._short_s
        timeout_s = short_s or float(qos.channel.visibility_timeout)
        socket_s = max(1.0, min(timeout_s / 4, 10.0))  # unless the user configured it: not for ever
        timeouts = {"socket_timeout": socket_s, "socket_connect_timeout": socket_s}
        self._acks.follow(qos, self._consumer.hub, has_marks=short_s is not None)
        self._followed = _Followed(
            qos,
            source,
            {**timeouts, **source.transport_options},
            Overdue(timeout_s, max(timeout_s, DEFAULT_VISIBILITY_S)),
            min(timeout_s / 4, _RENEW_AT_LEAST_EVERY_S),
        )

    def stop(self) -> None:
        """Stop renewing: kombu or another worker requeues what is still unacknowledged."""
        super().stop()
        with self._following:
            self._acks.stop()

    # --- the thread ----------------------------------------------------------------------------

    def run(self) -> None:
        is_well = True
        assert self._followed is not None
        while not self.stopping.wait(self._followed.renew_every_s):
            try:
                followed = self._connected()
                self._renew(followed)
                self._sweep(followed)
            except Exception as fault:  # noqa: BLE001 - kombu's transports raise what they like
                self._disconnect()
                if is_well and not self.stopping.is_set():
                    log.warning("unacknowledged messages cannot be renewed: %s", reason_of(fault))
                is_well = False
            else:
                if not is_well:
                    log.info("unacknowledged messages are renewed again")
                is_well = True
        self._disconnect()

    def _renew(self, followed: _Followed) -> None:
        self._next_renewal = time.monotonic() + followed.renew_every_s
        channel = self._channel
        tags = unacknowledged_tags(followed.qos)
        for start in range(0, len(tags), _BATCH_SIZE):
            now_s = time.time()  # kombu's clock, which others compare with theirs
            scores = dict.fromkeys(tags[start : start + _BATCH_SIZE], now_s)
            with channel.conn_or_acquire() as client:
                pipe = client.pipeline(transaction=False)
                pipe.zadd(channel.unacked_index_key, scores, xx=True)
                if followed.overdue.renewed_s < DEFAULT_VISIBILITY_S:
                    marks = renewal_marks(channel.unacked_index_key)
                    pipe.zadd(marks, scores, xx=True)
                    pipe.pexpire(marks, int(2000 * DEFAULT_VISIBILITY_S))
                pipe.execute()

    def _sweep(self, followed: _Followed) -> None:
        """Requeue overdue messages; log once if this Redis does not permit that."""
        now = time.monotonic()
        if now < self._next_sweep:
            return
        self._next_sweep = now + _SWEEP_EVERY_S
        try:
            self._requeue(followed)
        except FAULTS as fault:
            refusal = to_storage_error(fault, was_sent=True)
            if not isinstance(refusal, (StorageDenied, StorageUnusable)):
                raise
            if not self._is_refused:
                log.warning("messages of dead workers are requeued by kombu only: %s", refusal)
            self._is_refused = True
        else:
            self._is_refused = False

    def _requeue(self, followed: _Followed) -> None:
        """Requeue overdue messages; a dead worker may leave thousands, so renew in between."""
        channel = self._channel
        index = f"{channel.global_keyprefix}{channel.unacked_index_key}"
        with channel.conn_or_acquire() as client:
            while not self.stopping.is_set() and followed is self._followed:
                tags = claimed(_evaluate(client, claim(index, followed.overdue, time.time())))
                for tag in tags:
                    if time.monotonic() >= self._next_renewal:
                        self._renew(followed)
                    channel.qos.restore_by_tag(tag, client)
                if tags:
                    log.info("requeued %d unacknowledged messages of dead workers", len(tags))
                if len(tags) < MAX_TAGS:
                    return

    def _connected(self) -> _Followed:
        """Have a channel to the server of the consumer's latest connection."""
        followed = self._followed
        assert followed is not None
        if followed is not self._connected_for:
            self._disconnect()
        if self._channel is None:
            self._connection = followed.source.clone(transport_options=followed.options)
            self._channel = self._connection.channel()
            self._channel.qos.__class__ = mixed(RenewalMarkQoS, self._channel.qos.__class__)
            self._connected_for = followed
        return followed

    def _disconnect(self) -> None:
        connection, self._connection, self._channel = self._connection, None, None
        if connection is not None:
            with contextlib.suppress(Exception):  # the connection may be what has just failed
                connection.close()


def protect_other_workers(connection: Any) -> float | None:
    """Have kombu wait long enough before it requeues messages of other workers.

    Returns the shorter timeout, if one is configured. Kombu sweeps over every connection that waits
    for messages, including those for replies.
    """
    given = connection.transport_options.get("visibility_timeout")
    if given is None or connection.transport.driver_type != "redis":
        return None
    timeout_s = _checked(given)
    if timeout_s >= DEFAULT_VISIBILITY_S:
        return None
    connection.transport_options["visibility_timeout"] = DEFAULT_VISIBILITY_S
    return timeout_s


def unacknowledged_tags(qos: Any) -> list[str]:
    """The tags of the unacknowledged messages of this worker.

    Of this connection, all that are not acknowledged; of earlier ones only those whose tasks still
    run, since kombu and Celery have forgotten the rest, which must be redelivered.
    """
    tags = {tag for tag in _copied(qos._delivered) if tag not in qos._dirty}  # noqa: SLF001
    for request in _copied(state.active_requests):
        if not request.acknowledged and (tag := request.message.delivery_tag):
            tags.add(tag)
    return list(tags)


def _copied(things: Any) -> list[Any]:
    """A list of what another thread may be changing."""
    while True:
        try:
            return list(things)
        except RuntimeError:  # it has changed meanwhile
            continue


def _checked(timeout_s: Any) -> float:
    is_number = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool)
    if not is_number or timeout_s < _MIN_S:
        must = f"a number of seconds from {_MIN_S:g}: how long to wait for a dead worker"
        raise InvalidSetting("broker_transport_options['visibility_timeout']", timeout_s, must)
    return float(timeout_s)


def _evaluate(client: Any, call: Call) -> Any:
    """EVAL, since kombu's client with a key prefix changes the keys of EVALSHA."""
    script = call.script.source
    return client.execute_command("EVAL", script, len(call.keys), *call.keys, *call.args)
