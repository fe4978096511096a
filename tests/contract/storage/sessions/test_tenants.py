"""Tenants: places for live sessions, and what was used."""

from __future__ import annotations

import asyncio

import pytest

from capsule_tasks.errors import TenantFull
from tests.contract.storage.sessions.subjects import Subject


async def test_a_tenant_has_no_more_live_sessions_than_it_may(subject: Subject) -> None:
    tenants = subject.sessions().tenants
    replies = await asyncio.gather(
        *(tenants.reserve("acme", f"s{n}", max_sessions=3, lease_s=60) for n in range(8)),
        return_exceptions=True,
    )
    # A call whose reply was lost is repeated, and then counts those that came meanwhile, too.
    unexpected = [each for each in replies if not isinstance(each, int | TenantFull)]
    assert unexpected == []
    assert sum(isinstance(each, TenantFull) for each in replies) == 5
    free, _, _ = [f"s{n}" for n in range(8) if isinstance(replies[n], int)]
    assert await tenants.reserve("acme", free, max_sessions=3, lease_s=60) == 3
    await tenants.unreserve("acme", [free, "never"])
    assert (await tenants.usage("acme")).live == 2
    assert await tenants.reserve("acme", "another", max_sessions=3, lease_s=60) == 3
    with pytest.raises(TenantFull, match="'acme' has 3 live sessions"):
        await tenants.reserve("acme", free, max_sessions=3, lease_s=60)
    assert await tenants.reserve("acme", free, max_sessions=0, lease_s=60) == 4
    assert await tenants.reserve("other", free, max_sessions=1, lease_s=60) == 1


async def test_a_reservation_lapses_unless_it_is_renewed(subject: Subject) -> None:
    tenants = subject.sessions().tenants
    await tenants.reserve("acme", "dead", max_sessions=1, lease_s=0)
    await tenants.reserve("acme", "live", max_sessions=1, lease_s=0)
    await tenants.renew_reservations("acme", ["live"], lease_s=60)
    with pytest.raises(TenantFull):
        await tenants.reserve("acme", "other", max_sessions=1, lease_s=60)
    assert (await tenants.usage("acme")).live == 1
    assert [each async for each in tenants.sessions_of("acme")] == ["dead", "live"]


async def test_usage_is_counted_once_in_its_window_and_in_all(subject: Subject) -> None:
    tenants = subject.sessions().tenants
    nothing = await tenants.usage("acme")
    assert (nothing.live, nothing.cpu_ms, nothing.total_calls) == (0, 0, 0)
    for _ in range(2):
        assert await tenants.add_usage("acme", 30, operation_id="o") == 30
    await tenants.add_usage("acme", 12, 2)
    usage = await tenants.usage("acme")
    assert (usage.calls, usage.total_cpu_ms, usage.total_calls) == (3, 42, 3)
    assert usage.window_started_at % 86_400 == 0
    # In windows of another length the present one began at another time: it is a new one.
    longer = subject.sessions(usage_window_s=86_400 * 1000).tenants
    assert (await longer.usage("acme")).cpu_ms == 0
    assert await longer.add_usage("acme", 1) == 1
    assert (await longer.usage("acme")).total_cpu_ms == 43


async def test_sessions_of_a_tenant_are_known_from_the_first_call_on(subject: Subject) -> None:
    tenants = subject.sessions().tenants
    for number in range(3):
        await subject.submit("c", f"s{number}", tenant="acme")
    assert [each async for each in tenants.sessions_of("acme")] == ["s0", "s1", "s2"]
    for _ in range(2):
        await tenants.forget("acme")
    assert [each async for each in tenants.sessions_of("acme")] == []
