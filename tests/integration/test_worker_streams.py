"""The streams of a worker over a real Redis, which may be away, or reached too late."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from capsule_tasks.taskpool.jobs import SILENT, group_of
from tests.streaming import Ground, new_job


@pytest.fixture
async def ground(valkey_url: str) -> AsyncIterator[Ground]:
    ground = Ground(valkey_url)
    ground.streams.start()
    await ground.streams.tenure.is_held.wait()
    yield ground
    await ground.streams.stop()


@pytest.mark.parametrize(
    ("task_id", "kept"),
    [
        ("x" * 513, {}),
        ("", {}),
        ("\ud800", {}),
        ("fine", {"kept_byte": 1}),
        ("fine", {"kept_bytes": -1}),
        ("fine", {"kept_s": float("inf")}),
        ("fine", {"kept_s": "long"}),
        ("fine", "all of it"),
    ],
)
async def test_a_task_that_cannot_have_a_stream_runs_without(
    ground: Ground, task_id: str, kept: Any
) -> None:
    job = new_job(task_id, capsule_kept=kept)
    ground.streams.expect(task_id)
    ground.streams.admit(job)
    assert ground.crew.submitted == [job]
    assert job.publication is SILENT


async def test_a_group_that_cannot_be_counted_holds_up_no_other_note(ground: Ground) -> None:
    headers = {"group": "g" * 513, "group_index": 0}
    assert group_of(headers) == ("", -1)
    assert group_of({"group": "g", "group_index": 0}) == ("g", 0)
    for task_id, group in (("of-bad", (headers["group"], 0)), ("of-good", ("g", 0))):
        await ground.end(ground.admitted(new_job(task_id, group=group)))
    await ground.streams.notes.write()
    assert (await ground.store.read_group("g")).counts == {"succeeded": 1}
    assert {entry.execution_id for entry in await ground.store.list_recent()} == {
        "of-bad",
        "of-good",
    }
