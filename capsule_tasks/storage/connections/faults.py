"""Errors of redis-py as errors of this package: who has to act, what may have been written."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator

from redis import exceptions as raised

from capsule_tasks.errors import (
    StorageDenied,
    StorageError,
    StorageFull,
    StorageNotReady,
    StorageUnavailable,
    StorageUnusable,
    reason_of,
)

FAULTS = (raised.RedisError, raised.RedisClusterException, OSError, EOFError, TimeoutError)
"""Everything that a call may raise for reasons outside this process."""

_BEFORE_THE_CODE = (
    r"(Command # \d+ \(.*\) of pipeline caused error: )?"  # by redis-py, with the user's data
    r"(Error running script \(call to \w+\): )?(@user_script: ?\d+: )*-?"  # by Redis 6.2
)


def _coded(codes: str) -> re.Pattern[str]:
    return re.compile(rf"{_BEFORE_THE_CODE}({codes})\b", re.DOTALL)


_DENIED = re.compile(
    r"(?s).*(invalid (username|password)|without any password"
    r"|can't run this command|no permissions)"
)
_KIND_OF_REPLY: tuple[tuple[re.Pattern[str], type[StorageError]], ...] = (
    (_coded("OOM|MISCONF"), StorageFull),
    (
        _coded("READONLY|UNBLOCKED|LOADING|MASTERDOWN|CLUSTERDOWN|TRYAGAIN|NOREPLICAS|BUSY"),
        StorageNotReady,
    ),
    (_coded("NOAUTH|WRONGPASS|NOPERM"), StorageDenied),
    (_coded("WRONGTYPE"), StorageUnusable),
    (_DENIED, StorageDenied),
    (re.compile(""), StorageUnusable),
)
_KIND_OF_CLASS: tuple[tuple[type[Exception], type[StorageError]], ...] = (
    (raised.BusyLoadingError, StorageNotReady),
    (raised.AuthenticationError, StorageDenied),
    (raised.AuthorizationError, StorageDenied),
    (raised.NoPermissionError, StorageDenied),
    (raised.OutOfMemoryError, StorageFull),
    (raised.ReadOnlyError, StorageNotReady),
    (raised.TryAgainError, StorageNotReady),
    (raised.ClusterDownError, StorageNotReady),
)
_SCRIPT = re.compile(
    r"^Error running script \(call to \w+\): (@user_script: ?\d+: )*-?"  # Redis 6.2
    r"| script:( \w+,)? on \S+:\d+\.?$"
)
"""Says in which line of which script an error was met; the cause of the error keeps it."""


def to_storage_error(error: BaseException, *, was_sent: bool) -> StorageError:
    """The error to raise for an error of redis-py.

    `was_sent` says that the command may have reached the server. A server that answers with an
    error has written nothing: scripts check everything before they write. Only without an answer
    the command may have been done.
    """
    text = f"Redis: {_SCRIPT.sub('', reason_of(error))}"
    for kind, ours in _KIND_OF_CLASS:
        if isinstance(error, kind):
            return ours(text)
    if isinstance(error, raised.ResponseError):
        text_of_reply = str(error)
        return next(kind for reply, kind in _KIND_OF_REPLY if reply.match(text_of_reply))(text)
    return StorageUnavailable(text, may_have_written=was_sent)


@contextlib.contextmanager
def storage_errors(
    *, was_sent: bool, on_fault: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """Raise errors of redis-py in this block as `to_storage_error` translates them."""
    try:
        yield
    except FAULTS as error:
        on_fault()
        raise to_storage_error(error, was_sent=was_sent) from error


def is_temporary(error: BaseException | None) -> bool:
    """Whether the server refuses now and it, or another in its place, will serve again.

    The server loads, fails over, is a replica now or lacks replicas. Causes of the error count as
    well: kombu wraps some.
    """
    while error is not None:
        if isinstance(to_storage_error(error, was_sent=False), StorageNotReady):
            return True
        error = error.__cause__
    return False
