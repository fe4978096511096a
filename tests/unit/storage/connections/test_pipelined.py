"""A pipelined connection that is closed."""

from __future__ import annotations

import pytest

from capsule_tasks import errors
from capsule_tasks.storage.connections.pipelined import PipelinedConnection
from capsule_tasks.storage.executions.store import ExecutionStore


async def test_closed_connections_raise_a_clear_error() -> None:
    closing = PipelinedConnection("redis://localhost")
    await closing.close()
    with pytest.raises(errors.StorageClosed, match="are closed; make new ones"):
        await ExecutionStore(closing).read_record("one")
