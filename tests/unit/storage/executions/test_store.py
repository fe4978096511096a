"""The limits of a stream, as the scripts are given them."""

from __future__ import annotations

import msgspec
import pytest

from capsule_tasks.settings import ExecutionSettings
from capsule_tasks.storage.executions.store import attempt_details


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
