"""The index of named sessions, and lists of them."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest

from capsule_tasks.storage.sessions.index import SessionIndex
from capsule_tasks.storage.sessions.types import SessionEntry
from tests.contract.storage.sessions.subjects import PROFILE, Subject


async def ids(index: SessionIndex, **which: Any) -> list[str]:
    return [entry.session_id async for entry in index.entries(**which)]


async def a_millisecond_later(subject: Subject) -> None:
    """Return when what is used from now on was used later than all before."""
    store, started_at = subject.sessions(), None
    while started_at is None or (await store.info("clock")).used_at == started_at:
        await subject.submit(uuid4().hex, "clock")
        started_at = started_at or (await store.info("clock")).used_at
    await store.index.record(dropped=["clock"])


async def test_sessions_are_listed_by_when_they_were_recorded(subject: Subject) -> None:
    index = subject.sessions().index
    assert await ids(index) == []
    entries = [
        SessionEntry("a", "sandbox", "acme"),
        SessionEntry("b", "sandbox"),
        SessionEntry("c", "other", "acme"),
    ]
    await index.record(entries)
    await index.record([entries[0]])
    times = [entry.recorded_at async for entry in index.entries()]
    assert times[0] > times[1] > times[2] > 1e9
    assert await ids(index) == ["a", "c", "b"]
    assert await ids(index, tenant="acme") == ["a", "c"]
    assert await ids(index, profile="sandbox") == ["a", "b"]
    await index.record(dropped=["a", "never"])
    assert await ids(index) == ["c", "b"]


async def test_the_oldest_are_dropped_above_the_maximum(subject: Subject) -> None:
    index = subject.sessions(index_max=700).index
    for first in range(0, 1200, 400):
        await index.record([SessionEntry(f"s{first + n}", "p") for n in range(400)])
    assert await ids(index) == [f"s{n}" for n in reversed(range(500, 1200))]


async def test_a_submit_lists_the_session_unless_it_may_not_be_listed(subject: Subject) -> None:
    def refuse() -> None:
        raise ValueError("never listed")

    store = subject.sessions()
    with pytest.raises(ValueError, match="never listed"):
        await subject.submit("c1", tenant="acme", before_listing=refuse)
    assert await ids(store.index) == await subject.wanted() == []
    await subject.submit("c1", tenant="acme")
    assert await ids(store.index, tenant="acme", profile=PROFILE) == ["s"]
    assert await subject.wanted() == ["s"]
    await store.index.record(dropped=["s"])
    await subject.submit("c2", before_listing=refuse)  # the session has calls, so it is listed
    assert await ids(store.index) == []


async def test_a_list_has_the_sessions_as_they_are_in_the_order_of_their_use(
    subject: Subject,
) -> None:
    store = subject.sessions()
    names = [f"s{n}" for n in range(5)]
    await store.index.record([SessionEntry(name, PROFILE) for name in [*names, "never-used"]])
    for name in reversed(names):  # in the other order
        await subject.submit(f"{name}-1", name)
        await a_millisecond_later(subject)
    assert [info.session_id for info in await store.list_sessions()] == names
    taken = await subject.take("w1", "s3")
    begun = await store.begin("s3", taken.token)
    assert begun is not None
    await store.done("s3", taken.token, begun.seq)
    first, *others = await store.list_sessions()
    assert (first.session_id, first.executions, first.owner) == ("s3", 1, "w1")
    assert [info.session_id for info in others] == ["s0", "s1", "s2", "s4"]
    assert len(await store.list_sessions(limit=2)) == 2
    assert await store.list_sessions(profile="other") == []
    assert await store.list_sessions(limit=1000) == [first, *others]
