"""How far a group is, by its counter and by the result backend: each member once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from capsule_tasks.client.group import GroupCount
from capsule_tasks.protocol.events import Ended, Outcome
from capsule_tasks.storage.executions.types import GroupProgress

MEMBERS = [f"m{place}" for place in range(20)]
places = st.sets(st.integers(0, len(MEMBERS) - 1))


def bits(of: set[int]) -> bytes:
    """As SETBIT leaves it: as long as the last place needs."""
    return bytes(
        sum(0x80 >> place % 8 for place in of if place // 8 == byte)
        for byte in range(max(of, default=-1) // 8 + 1)
    )


def counter(of: set[int]) -> GroupProgress:
    return GroupProgress({"succeeded": len(of)} if of else {}, (), bits(of))


def ends(of: set[int]) -> dict[str, Ended]:
    return {MEMBERS[place]: Ended(outcome=Outcome.SUCCEEDED) for place in of}


@given(places, places, places)
def test_each_member_counts_once_whether_counter_or_stream_is_read_first(
    counted: set[int], stored: set[int], later: set[int]
) -> None:
    tally = GroupCount(len(MEMBERS), MEMBERS)
    tally.take(counter(counted))
    assert set(tally.missing()) == set(range(len(MEMBERS))) - counted
    tally.add(tally.missing(), ends(stored))
    assert tally.done == len(counted | stored)
    tally.take(counter(counted | later))
    assert tally.done == len(counted | stored | later)
    assert tally.state().counts.get("succeeded", 0) == tally.done
    assert set(tally.missing()) == set(range(len(MEMBERS))) - (counted | stored | later)


@given(places, places)
def test_a_counter_that_lost_a_part_is_not_believed(counted: set[int], stored: set[int]) -> None:
    tally = GroupCount(len(MEMBERS), MEMBERS)
    tally.take(GroupProgress({"succeeded": len(counted) + 1}, (), bits(counted)))
    assert tally.missing() == list(range(len(MEMBERS)))
    tally.add(tally.missing(), ends(stored))
    assert tally.state().counts.get("succeeded", 0) == tally.done == len(stored)


def test_a_failure_is_listed_once() -> None:
    tally = GroupCount(len(MEMBERS), MEMBERS)
    tally.take(counter(set()))
    failed = Ended(outcome=Outcome.FAILED, type="ValueError", message="why")
    tally.add([3], {"m3": failed})
    (failure,) = tally.state().failures
    assert (failure.execution_id, failure.reason) == ("m3", "ValueError: why")
    again = GroupProgress({"failed": 2}, (("1-0", "m3", "why"), ("2-0", "m4", "too")), bits({3, 4}))
    tally.take(again)
    state = tally.state()
    assert [failure.execution_id for failure in state.failures] == ["m4"]
    assert state.counts == {"failed": 2}
    assert tally.after == "2-0"


def test_without_members_the_counter_alone_tells() -> None:
    tally = GroupCount(2)
    tally.take(counter({0, 9}))
    assert (tally.done, tally.missing(), tally.has_backend_ends) == (2, [], False)
