"""Keeps what this worker holds from being delivered again, and puts back what dead ones held.

With a Redis broker, kombu notes when each message was delivered, and delivers it again once its
visibility timeout has passed, whether its worker lives or not. Here a thread with a connection of
its own writes that time anew for as long as the worker lives, so the timeout is how long a *dead*
worker is waited for, and long tasks and long ETAs need no longer one. It works while the hub thread
waits for the last tasks, too.

A timeout shorter than SAFE_S would harm workers that do not renew: theirs are long tasks as well.
So under a short one each message is marked as renewed when it is delivered, and what carries no
mark is waited for SAFE_S all the same.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import Any

from celery.worker import state

from capsule_tasks.errors import InvalidSetting, StorageDenied, StorageUnusable, reason_of
from capsule_tasks.storage.connections.faults import FAULTS, told
from capsule_tasks.storage.keys import unacked_marks
from capsule_tasks.storage.scripts import Call
from capsule_tasks.storage.unacked_core import MOST, Overdue, claim, claimed
from capsule_tasks.taskpool.noting import Notes, marking
from capsule_tasks.taskpool.turns import QuietThread

log = logging.getLogger("capsule_tasks.taskpool")

SAFE_S = 3600.0
"""Kombu's own default: what workers that do not renew are given, whatever is configured here."""
_SHORTEST_S = 1.0
_RENEW_AT_LEAST_EVERY_S = 2.5
"""Also under a long timeout: another worker of these queues may have been given a shorter one."""
_SWEEP_EVERY_S = 5.0
_MOST_AT_ONCE = 1000
_JOIN_S = 5.0


class Holding:
    """Renews and puts back, from the first `watch` to `stop`; both idempotent."""

    def __init__(self) -> None:
        self._keeper: QuietThread | None = None
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._connection: Any = None
        self._channel: Any = None
        self._is_stale = False
        self._qos: Any = None
        self._overdue = Overdue(SAFE_S, SAFE_S)
        self._options: dict[str, Any] = {}
        self._source: Any = None
        self._next_sweep = 0.0
        self._short_s: float | None = None
        self._notes = Notes()
        self._every_s = _RENEW_AT_LEAST_EVERY_S
        self._next_renewal = 0.0
        self._is_refused = False

    def prepare(self, connection: Any) -> None:
        """Have kombu's own sweep, the first of which is made on connecting, wait long enough.

        InvalidSetting for a timeout that cannot be kept.
        """
        short_s = spare_others(connection)
        if short_s is not None:  # of a connection that comes here again nothing is short any more
            self._short_s = short_s

    def watch(self, consumer: Any) -> None:
        """Look after a consumer that has just connected, before it gets its first message.

        Nothing is done for a broker without visibility timeouts.
        """
        qos: Any = getattr(getattr(consumer.task_consumer, "channel", None), "qos", None)
        if not hasattr(qos, "unacked_index_key"):
            return
        is_short = self._short_s is not None
        timeout_s = self._short_s or float(qos.channel.visibility_timeout)
        self._notes.follow(qos, consumer.hub, has_marks=is_short)
        with self._lock:
            self._qos = qos
            self._overdue = Overdue(timeout_s, max(timeout_s, SAFE_S))
            self._every_s = min(timeout_s / 4, _RENEW_AT_LEAST_EVERY_S)
            self._source = consumer.connection
            self._options = {**_patience(timeout_s), **consumer.connection.transport_options}
            self._is_stale = True  # the thread's connection: its server may not be this consumer's
        if self._keeper is None:
            self._over.clear()
            self._keeper = QuietThread(target=self._keep, name="capsule-holding", daemon=True)
            self._keeper.start()

    def stop(self) -> None:
        """Let go: what is still held is given back by kombu, or found by others."""
        self._notes.end()
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            self._over.set()
            keeper.join(_JOIN_S)

    # --- the thread ----------------------------------------------------------------------------

    def _keep(self) -> None:
        is_well = True
        while not self._over.wait(self._every_s):
            try:
                channel = self._connected()
                self._renew(channel)
                self._sweep(channel)
            except Exception as fault:  # noqa: BLE001 - kombu's transports raise what they like
                self._disconnect()
                if is_well and not self._over.is_set():
                    log.warning("what this worker holds cannot be renewed: %s", reason_of(fault))
                is_well = False
            else:
                if not is_well:
                    log.info("what this worker holds is renewed again")
                is_well = True
        self._disconnect()

    def _renew(self, channel: Any) -> None:
        self._next_renewal = time.monotonic() + self._every_s
        tags = held(self._qos)
        for start in range(0, len(tags), _MOST_AT_ONCE):
            now_s = time.time()  # kombu's clock, which others compare with theirs
            scores = dict.fromkeys(tags[start : start + _MOST_AT_ONCE], now_s)
            with channel.conn_or_acquire() as client:
                pipe = client.pipeline(transaction=False)
                pipe.zadd(channel.unacked_index_key, scores, xx=True)
                if self._overdue.renewed_s < SAFE_S:
                    marks = unacked_marks(channel.unacked_index_key)
                    pipe.zadd(marks, scores, xx=True)
                    pipe.pexpire(marks, int(2000 * SAFE_S))
                pipe.execute()

    def _sweep(self, channel: Any) -> None:
        """Put back what is overdue; told once if this Redis does not let it."""
        now = time.monotonic()
        if now < self._next_sweep:
            return
        self._next_sweep = now + _SWEEP_EVERY_S
        try:
            self._put_back(channel)
        except FAULTS as fault:
            refusal = told(fault, was_sent=True)
            if not isinstance(refusal, (StorageDenied, StorageUnusable)):
                raise
            if not self._is_refused:
                log.warning("what dead workers held is put back by kombu alone: %s", refusal)
            self._is_refused = True
        else:
            self._is_refused = False

    def _put_back(self, channel: Any) -> None:
        """A dead worker may leave thousands: what lives is renewed meanwhile."""
        index = f"{channel.global_keyprefix}{channel.unacked_index_key}"
        with channel.conn_or_acquire() as client:
            while not self._over.is_set() and not self._is_stale:
                tags = claimed(_evaluate(client, claim(index, self._overdue, time.time())))
                for tag in tags:
                    if time.monotonic() >= self._next_renewal:
                        self._renew(channel)
                    channel.qos.restore_by_tag(tag, client)
                if tags:
                    log.info("messages that nobody holds any more are put back: %d", len(tags))
                if len(tags) < MOST:
                    return

    def _connected(self) -> Any:
        with self._lock:
            if self._is_stale:
                self._disconnect()
                self._is_stale = False
            if self._channel is None:
                self._connection = self._source.clone(transport_options=self._options)
                self._channel = self._connection.channel()
                self._channel.qos.__class__ = marking(self._channel.qos.__class__)
        return self._channel

    def _disconnect(self) -> None:
        connection, self._connection, self._channel = self._connection, None, None
        if connection is not None:
            with contextlib.suppress(Exception):  # it may be what has just failed
                connection.close()


def spare_others(connection: Any) -> float | None:
    """Have kombu wait long enough before it puts back what others hold; the shorter time if any.

    It looks for that over every connection that waits for messages, those of answers too.
    """
    given = connection.transport_options.get("visibility_timeout")
    if given is None or connection.transport.driver_type != "redis":
        return None
    timeout_s = _checked(given)
    if timeout_s >= SAFE_S:
        return None
    connection.transport_options["visibility_timeout"] = SAFE_S
    return timeout_s


def held(qos: Any) -> list[str]:
    """The tags of the messages that this worker has in hand.

    Of this connection all that is not acknowledged; of those before only what still runs, as kombu
    and Celery have forgotten the rest, and it must come again.
    """
    tags = {tag for tag in _copied(qos._delivered) if tag not in qos._dirty}  # noqa: SLF001
    for request in _copied(state.active_requests):
        if not request.acknowledged and (tag := request.message.delivery_tag):
            tags.add(tag)
    return list(tags)


def _copied(things: Any) -> list[Any]:
    """What another thread may be changing."""
    while True:
        try:
            return list(things)
        except RuntimeError:  # it has changed meanwhile
            continue


def _checked(timeout_s: Any) -> float:
    is_number = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool)
    if not is_number or timeout_s < _SHORTEST_S:
        must = f"a number of seconds from {_SHORTEST_S:g}: how long a dead worker is waited for"
        raise InvalidSetting("broker_transport_options['visibility_timeout']", timeout_s, must)
    return float(timeout_s)


def _patience(timeout_s: float) -> dict[str, float]:
    """How long the thread waits for Redis, unless the user has said so: it must not be for ever."""
    socket_s = max(1.0, min(timeout_s / 4, 10.0))
    return {"socket_timeout": socket_s, "socket_connect_timeout": socket_s}


def _evaluate(client: Any, call: Call) -> Any:
    """EVAL, since kombu's client with a key prefix changes the keys of EVALSHA."""
    script = call.script.source
    return client.execute_command("EVAL", script, len(call.keys), *call.keys, *call.args)
