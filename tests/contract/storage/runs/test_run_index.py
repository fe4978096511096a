"""The index of runs: no change is made whose entry another one may have dropped."""

from __future__ import annotations

from capsule_tasks.settings import RunSettings
from capsule_tasks.storage.runs import scripts
from capsule_tasks.storage.runs.locations import Place, RunLocations
from capsule_tasks.storage.runs.replies import pack
from capsule_tasks.storage.runs.run_index import RunIndex
from capsule_tasks.storage.scripts import Code
from tests.contract.storage.runs.subjects import Subject


async def test_a_change_that_was_listed_before_another_one_is_listed_again(
    subject: Subject,
) -> None:
    """A claim stood still while the owner handed the run back, and dropped the claim's entry."""
    settings = RunSettings(prefix=subject.prefix)
    runs, index = subject.runs(), RunIndex(settings)
    claim = await subject.claimed(runs)
    place = Place("run-1", "user-42", "triage", RunLocations(settings).keys("user-42", "run-1"))
    added_ms = await subject.drive(index.add(place, "running"))
    await runs.release(claim)
    late = scripts.run_claim.call(
        place.keys,
        operation_id="run_claim:late",
        ttl_ms=1000,
        incarnation="w1",
        steal=0,
        readable=pack([]),
        listed=pack({"running": added_ms - 1}),
        message=b"",
        held_ms=2**52,
    )
    assert await subject.call(late) == [Code.LATE, b"running"]
    assert (await runs.claim("run-1", "w1")).owner == "w1"
    assert [run.run_id for run in (await runs.list(status="running")).runs] == ["run-1"]
