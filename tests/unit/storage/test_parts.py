"""Keys, records and faults, each by itself."""

from __future__ import annotations

import contextlib
import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis import exceptions as raised

from capsule_tasks.errors import (
    InvalidId,
    InvalidSetting,
    StorageDenied,
    StorageFull,
    StorageNotReady,
    StorageUnavailable,
    StorageUnusable,
)
from capsule_tasks.settings import ExecutionSettings
from capsule_tasks.storage.codec import Unreadable, canonical, decoded, encoded
from capsule_tasks.storage.connections.faults import is_temporary, to_storage_error
from capsule_tasks.storage.executions.core import attempt_details
from capsule_tasks.storage.keys import SessionKeys, escaped

ids = st.text(st.characters(codec="utf-8"), min_size=1, max_size=40)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False).filter(
        math.isfinite
    ),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip
objects = st.dictionaries(st.text(), json_values, max_size=5)


# --- keys ----------------------------------------------------------------------------------------


@given(ids, ids)
def test_two_ids_have_two_spellings_and_none_can_end_a_tag(one: str, other: str) -> None:
    spellings = [escaped("id", value) for value in (one, other)]
    assert (spellings[0] == spellings[1]) == (one == other)
    assert not set("{}: \n\r\x00") & set(spellings[0])
    keys = SessionKeys(one)
    for key in (keys.items, keys.history, keys.operations, keys.quarantine, keys.staging("op")):
        assert key.startswith(f"capsule:{{S:{spellings[0]}}}:")


@pytest.mark.parametrize("prefix", ["", "a{b", "a}b", "a b", "a\n", "ä", "x" * 129])
def test_a_prefix_that_would_move_keys_to_another_slot_is_refused(prefix: str) -> None:
    with pytest.raises(InvalidSetting, match="prefix"):
        SessionKeys("s", prefix)


def test_an_id_is_measured_in_bytes() -> None:
    escaped("id", "é" * 256)
    with pytest.raises(InvalidId, match="514 bytes"):
        escaped("id", "é" * 257)


# --- records -------------------------------------------------------------------------------------


@given(objects)
def test_what_is_json_comes_back_as_it_was(item: dict[str, Any]) -> None:
    found = decoded(encoded(item))
    assert found == item
    assert canonical(found) == canonical(item)
    assert list(found) == list(item)


@given(st.binary(max_size=60))
def test_no_bytes_do_more_than_be_unreadable(record: bytes) -> None:
    with contextlib.suppress(Unreadable):
        assert isinstance(decoded(record), dict)


@pytest.mark.parametrize("text", ['{"a": 1}', ' {"a":1} ', '{"a":1,"a":2}', "{}", '{"a":1e400}'])
def test_any_spelling_of_an_object_is_readable(text: str) -> None:
    assert decoded(text.encode()) == json.loads(text)


def test_deep_nesting_is_refused_when_written_and_skipped_when_read() -> None:
    item: dict[str, Any] = {}
    for _ in range(100_000):
        item = {"a": item}
    with pytest.raises(ValueError, match="nested"):
        encoded(item)
    with pytest.raises(Unreadable):
        decoded(b'{"a":' * 100_000 + b"1" + b"}" * 100_000)


# --- faults --------------------------------------------------------------------------------------

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
def test_what_a_server_refuses_for_now_is_temporary(error: Exception, expected: bool) -> None:
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
def test_silence_leaves_it_open_only_after_sending(error: Exception, was_sent: bool) -> None:
    found = to_storage_error(error, was_sent=was_sent)
    assert type(found) is StorageUnavailable
    assert found.may_have_written == was_sent


# --- limits of executions ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("live", "kept", "mark"), [(2**20, 2**16, 2**14), (2**20, 4096, 1024), (2**30, 4096, 2**18)]
)
def test_the_marks_that_a_stream_is_trimmed_by_are_never_too_many(
    live: int, kept: int, mark: int
) -> None:
    settings = ExecutionSettings(live_bytes=live, retention_bytes=kept)
    limits = msgspec.msgpack.decode(attempt_details("late", "t", "w", "", -1, settings))[-1]
    assert limits.split()[:3] == [str(mark), str(live), str(kept)]
    assert live // mark <= 4096
