"""Writes deliveries and acknowledgements as kombu does, but without waiting for replies.

Kombu makes a call for each delivery and one for each acknowledgement, and the caller waits
for both answers. Here they go over one connection, and their answers are read before the next are
sent. What was not confirmed is kept, and sent once more on the next connection.

Never is anything sent while an answer lies unread: when a process is killed then, its connection is
reset, and what the server has not read yet is lost.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

from redis.exceptions import ResponseError

from capsule_tasks.errors import StorageUnavailable
from capsule_tasks.storage.connections.faults import FAULTS, storage_errors
from capsule_tasks.storage.keys import renewal_marks
from capsule_tasks.storage.scripts import Argument, packed

_TIMEOUT_S = 10.0
"""For an answer, and for a connection; kombu's own have no limit."""

_MULTI, _EXEC = packed([b"MULTI"]), packed([b"EXEC"])


class _Unconfirmed:
    """Deliveries and acknowledgements that Redis has not confirmed.

    A message that is acknowledged and then redelivered is in both: the deletion is written first.
    """

    __slots__ = ("acknowledged", "delivered")

    def __init__(self) -> None:
        self.delivered: dict[str, str] = {}
        self.acknowledged: dict[str, None] = {}

    def __bool__(self) -> bool:
        return bool(self.delivered or self.acknowledged)

    def add(self, later: _Unconfirmed) -> None:
        for tag in later.acknowledged:
            self.delivered.pop(tag, None)
        self.acknowledged |= later.acknowledged
        self.delivered |= later.delivered


class UnackedWriter:
    """Writes for one channel of kombu, used by one thread."""

    def __init__(self, channel: Any, *, has_marks: bool) -> None:
        """With `has_marks` each delivery is marked as renewed."""
        prefix = getattr(channel, "global_keyprefix", "")
        self._messages = prefix + channel.unacked_key
        self._index = prefix + channel.unacked_index_key
        self._indexes = [self._index]
        if has_marks:
            self._indexes.append(renewal_marks(self._index))
        self._pool = channel.pool
        self._connection: Any = None
        self._new = _Unconfirmed()
        self._sent = _Unconfirmed()
        """The commands that are sent and not answered."""
        self._answers = 0
        """So many are to come."""

    @property
    def is_flushed(self) -> bool:
        """Whether everything is known to be written."""
        return not self._sent and not self._new

    def deliver(self, tag: str, message: str) -> None:
        """It was delivered."""
        self._new.delivered[tag] = message

    def ack(self, tag: str) -> None:
        """It was acknowledged."""
        self._new.delivered.pop(tag, None)
        self._new.acknowledged[tag] = None

    @property
    def is_answered(self) -> bool:
        """Whether nothing has to be waited for now."""
        try:
            return not self._answers or bool(self._connection.can_read(0))
        except FAULTS:
            return True

    def write(self) -> None:
        """Send what is new; StorageError if it must be tried again later."""
        with contextlib.suppress(StorageUnavailable):  # what lay idle may have been closed
            self._read()
        self._send()

    def flush(self) -> None:
        """Write everything and wait until it is done; StorageError if it is not."""
        self.write()
        self._read()

    def close(self) -> None:
        """End the connection; what was not confirmed is kept."""
        connection, self._connection = self._connection, None
        self._sent.add(self._new)
        self._new, self._sent, self._answers = self._sent, _Unconfirmed(), 0
        if connection is not None:
            with contextlib.suppress(Exception):  # it may be what has just failed
                connection.disconnect()

    def take_over(self, other: UnackedWriter) -> None:
        """Go on with what another one could not write; that is closed."""
        other.close()
        other._new.add(self._new)
        self._new, other._new = other._new, _Unconfirmed()

    # --- the connection ------------------------------------------------------------------------

    def _send(self) -> None:
        if not self._new:
            return
        commands = self._commands(self._new)
        with storage_errors(was_sent=True, on_fault=self.close):
            if self._connection is None:
                self._connection = self._connected()
            self._new, self._sent, self._answers = _Unconfirmed(), self._new, len(commands)
            self._connection.send_packed_command([b"".join(commands)], check_health=False)

    def _read(self) -> None:
        """The answers to what is on its way."""
        refusal: ResponseError | None = None
        with storage_errors(was_sent=True, on_fault=self.close):
            while self._answers:
                self._answers -= 1
                try:
                    self._connection.read_response(disable_decoding=True)
                except ResponseError as error:
                    refusal = refusal or error
            if refusal is not None:
                raise refusal
        self._sent = _Unconfirmed()

    def _commands(self, notes: _Unconfirmed) -> list[bytes]:
        """The commands for Redis: deletions first, outside of the transaction.

        A Redis that is out of memory refuses the transaction, but accepts deletions. Deletions need
        no transaction: an index entry without its message has no effect.
        """
        commands: list[bytes] = []
        if notes.acknowledged:
            commands.append(packed([b"HDEL", self._messages, *notes.acknowledged]))
            commands += [packed([b"ZREM", index, *notes.acknowledged]) for index in self._indexes]
        if notes.delivered:
            commands.append(_MULTI)
            now_s = f"{time.time():.6f}"  # kombu's clock, which others compare with theirs
            scores: list[Argument] = []
            fields: list[Argument] = []
            for tag, message in notes.delivered.items():
                scores += (now_s, tag)
                fields += (tag, message)
            commands += [packed([b"ZADD", index, *scores]) for index in self._indexes]
            commands += [packed([b"HSET", self._messages, *fields]), _EXEC]
        return commands

    def _connected(self) -> Any:
        """A connection like those of the pool, but with time limits and outside of the pool."""
        limits = {"socket_timeout": _TIMEOUT_S, "socket_connect_timeout": _TIMEOUT_S}
        given = self._pool.connection_kwargs
        limits = {name: given.get(name) or limit for name, limit in limits.items()}
        connection = self._pool.connection_class(**{**given, **limits})
        connection.connect()
        return connection
