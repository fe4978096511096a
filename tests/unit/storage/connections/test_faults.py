"""Which of our errors an error of redis-py becomes, and whether it is temporary."""

from __future__ import annotations

import pytest
from redis import exceptions as raised

from capsule_tasks.errors import (
    StorageDenied,
    StorageFull,
    StorageNotReady,
    StorageUnavailable,
    StorageUnusable,
)
from capsule_tasks.storage.connections.faults import is_temporary, to_storage_error

REPLIES = {
    "OOM command not allowed when used memory > 'maxmemory'.": StorageFull,
    "Error running script (call to f_x): @user_script:9: @user_script: 9: -OOM command not "
    "allowed when used memory > 'maxmemory'.": StorageFull,
    "MISCONF Redis is configured to save RDB snapshots": StorageFull,
    "-READONLY You can't write against a read only replica.": StorageNotReady,
    "MASTERDOWN Link with MASTER is down": StorageNotReady,
    "CLUSTERDOWN The cluster is down": StorageNotReady,
    "BUSY Redis is busy running a script.": StorageNotReady,
    "NOREPLICAS Not enough good replicas to write.": StorageNotReady,
    "UNBLOCKED force unblock from blocking operation, instance state changed": StorageNotReady,
    "Command # 2 (LPUSH WRONGTYPE b) of pipeline caused error: NOREPLICAS Not enough good "
    "replicas to write.": StorageNotReady,
    "Error running script (call to f_x): @user_script:1: @user_script: 1: -READONLY You can't "
    "write against a read only replica.": StorageNotReady,
    "Command # 1 (LPUSH LOADING\nb) of pipeline caused error: WRONGTYPE Operation against a key "
    "holding the wrong kind of value": StorageUnusable,
    "WRONGTYPE Operation against LOADING": StorageUnusable,
    "BUSYGROUP Consumer Group name already exists": StorageUnusable,
    "NOPERM this user has no permissions": StorageDenied,
    "@user_script: 3: The user executing the script can't run this command": StorageDenied,
    "WRONGTYPE Operation against a key holding the wrong kind of value": StorageUnusable,
    "unknown command 'EVALSHA'": StorageUnusable,
}


@pytest.mark.parametrize(("text", "kind"), REPLIES.items())
def test_an_error_that_the_server_tells_wrote_nothing(text: str, kind: type) -> None:
    error = to_storage_error(raised.ResponseError(text), was_sent=True)
    assert type(error) is kind
    assert not error.may_have_written
    assert text.rpartition(" -")[2] in str(error)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", f" script: {'4d14' * 10}, on @user_script:280."),
        ("", " script: on @user_script:1."),
        (f"Error running script (call to f_{'4d14' * 10}): @user_script:9: @user_script: 9: -", ""),
    ],
    ids=["by its hash", "by its text", "6.2"],
)
def test_an_error_does_not_tell_the_script_that_met_it(before: str, after: str) -> None:
    text = "READONLY You can't write against a read only replica."
    for kind in (raised.ReadOnlyError, raised.ResponseError):
        error = to_storage_error(kind(f"{before}{text}{after}"), was_sent=True)
        assert type(error) is StorageNotReady
        assert str(error) == f"Redis: {text} (nothing was written)"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (raised.BusyLoadingError("loading"), StorageNotReady),
        (raised.ReadOnlyError("x"), StorageNotReady),
        (raised.TryAgainError("x"), StorageNotReady),
        (raised.ClusterDownError("x"), StorageNotReady),
        (raised.AuthenticationError("x"), StorageDenied),
        (raised.OutOfMemoryError("x"), StorageFull),
    ],
)
def test_errors_with_a_class_of_their_own(error: Exception, kind: type) -> None:
    assert type(to_storage_error(error, was_sent=True)) is kind


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (raised.BusyLoadingError("Redis is loading the dataset in memory"), True),
        (raised.MasterDownError("Link with MASTER is down"), True),
        (raised.ResponseError("UNBLOCKED force unblock from blocking operation"), True),
        (raised.ResponseError("NOREPLICAS Not enough good replicas to write."), True),
        (raised.ResponseError("WRONGTYPE Operation against a key"), False),
        (raised.NoPermissionError("this user has no permissions"), False),
        (raised.OutOfMemoryError("command not allowed"), False),
        (raised.ConnectionError("READONLY"), False),
        (ValueError("READONLY, says nobody"), False),
    ],
    ids=str,
)
def test_a_refusal_for_now_is_temporary(error: Exception, expected: bool) -> None:
    wrapped = ValueError("raised from it")
    wrapped.__cause__ = error
    assert is_temporary(error) is expected
    assert is_temporary(wrapped) is expected


@pytest.mark.parametrize("was_sent", [False, True])
@pytest.mark.parametrize(
    "error",
    [raised.ConnectionError("x"), raised.TimeoutError(), TimeoutError(), ConnectionResetError(),
     raised.RedisClusterException("x")],
    ids=repr,
)  # fmt: skip
def test_a_missing_reply_leaves_the_effect_unknown_only_after_sending(
    error: Exception, was_sent: bool
) -> None:
    found = to_storage_error(error, was_sent=was_sent)
    assert type(found) is StorageUnavailable
    assert found.may_have_written == was_sent
