"""Errors of Redis and of what is stored there: histories and leases."""

from __future__ import annotations

from capsule_tasks.errors.base import (
    CallerError,
    CapsuleError,
    OperatorError,
    RetryError,
    described,
)


@described("{text} ({known})")
class StorageError(CapsuleError):
    """Redis did not do what was asked, or its reply was lost.

    `may_have_written` tells whether the write may have happened, or may still happen.
    `operation_id` is the id of the write: repeated under it, the same call is done at most once.
    """

    message: str
    may_have_written: bool = False
    operation_id: str | None = None

    @property
    def text(self) -> str:
        return self.message or type(self).__name__

    @property
    def known(self) -> str:
        return "the write may have happened" if self.may_have_written else "nothing was written"


class StorageUnavailable(StorageError, RetryError):
    """Redis cannot be reached, or the connection was lost or timed out."""


class StorageNotReady(StorageError, RetryError):
    """Redis answers, but does not serve now: it loads, fails over, or is read-only."""


class StorageForgotten(StorageError, RetryError):
    """A write was repeated so late that Redis no longer knows whether it had been done."""


class StorageFull(StorageError, OperatorError):
    """Redis is out of memory, or cannot save to its disk."""


class StorageDenied(StorageError, OperatorError):
    """Redis refuses this user: the password is wrong, or a permission is missing."""


class StorageUnusable(StorageError, OperatorError):
    """The server is not one that this package can use, or a key holds something else."""


class StorageClosed(CallerError, RuntimeError):
    """Connections were used after they had been closed."""


@described("item {index} cannot be stored: {reason}")
class ItemNotStorable(CallerError, TypeError):
    """An item of a batch cannot be stored as JSON; nothing of the batch was."""

    index: int
    reason: str


@described("item {index} has {size} bytes, over the limit of {limit}")
class ItemTooLarge(CallerError, ValueError):
    """An item of a batch is over the limit of one item; nothing of the batch was stored."""

    index: int
    size: int
    limit: int


@described(
    "history {session_id!r} holds {length} items of {size} bytes together; what was to be added "
    "would take it over its limits of {max_items} items and {max_bytes} bytes"
)
class HistoryFull(CallerError):
    """A history would grow over its limit; nothing was written. Replace or clear it first."""

    session_id: str
    length: int
    size: int
    max_items: int
    max_bytes: int


@described("history {session_id!r}: {reason}; read it again")
class HistoryConflict(RetryError):
    """A history changed between reading and writing it; nothing was written. Read it again."""

    session_id: str
    reason: str


@described("no key has the id {key_id}; given were {known!r}")
class UnknownKey(OperatorError):
    """A record was encrypted with a key that was not given."""

    key_id: str
    known: tuple[str, ...]


@described("the lease of {incarnation!r} has lapsed, and stays so")
class LeaseLost(RetryError):
    """This worker's lease has lapsed: what it held belongs to others. Begin a new incarnation."""

    incarnation: str


@described("the lease of {incarnation!r} is held by another worker; begin a new incarnation")
class LeaseTaken(LeaseLost):
    """Another worker has the lease of this incarnation: begin a new one."""


@described(
    "{incarnation!r} has no lease on the Redis of this run; acquire one there before claiming, by "
    "store.lease(incarnation).acquire(), and renew it"
)
class LeaseMissing(CallerError, RuntimeError):
    """A worker without a lease cannot claim a run: any other worker could take it at once."""

    incarnation: str


@described("the checkpoint of session {session_id!r} cannot be read: {reason}")
class CheckpointUnreadable(OperatorError):
    """Data of a checkpoint is missing or damaged; the session has lost its namespace."""

    session_id: str
    reason: str


class BlobsUnavailable(RetryError):
    """The directory or the object store of checkpoints did not do what was asked."""
