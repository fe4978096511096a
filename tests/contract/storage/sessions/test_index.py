"""The index of named sessions."""

from __future__ import annotations

from capsule_tasks.storage.sessions.types import SessionEntry
from tests.contract.storage.sessions.subjects import Subject


async def test_sessions_are_listed_by_when_they_were_recorded(subject: Subject) -> None:
    index = subject.sessions().index
    assert await index.list_sessions() == []
    entries = [
        SessionEntry("a", "sandbox", "acme", "w1", 1),
        SessionEntry("b", "sandbox"),
        SessionEntry("c", "other", "acme"),
    ]
    await index.record(entries)
    await index.record([entries[0]])
    listed = await index.list_sessions()
    assert [each.session_id for each in listed] == ["a", "c", "b"]
    assert (listed[0].owner, listed[0].executions) == ("w1", 1)
    assert listed[0].recorded_at > listed[1].recorded_at > listed[2].recorded_at > 1e9
    assert [each.session_id for each in await index.list_sessions(tenant="acme")] == ["a", "c"]
    assert [each.session_id for each in await index.list_sessions(profile="sandbox")] == ["a", "b"]
    assert len(await index.list_sessions(limit=2)) == 2
    await index.record(dropped=["a", "never"])
    assert [each.session_id for each in await index.list_sessions()] == ["c", "b"]


async def test_the_oldest_are_dropped_above_the_maximum(subject: Subject) -> None:
    index = subject.sessions(index_max=700).index
    for first in range(0, 1200, 400):
        await index.record([SessionEntry(f"s{first + n}", "p") for n in range(400)])
    listed = await index.list_sessions(limit=10_000)
    assert [each.session_id for each in listed] == [f"s{n}" for n in reversed(range(500, 1200))]
