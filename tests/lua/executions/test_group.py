"""The members of a group and how they ended."""

from __future__ import annotations

from capsule_tasks.storage.keys import GroupKeys
from capsule_tasks.storage.scripts import Code
from tests.lua.executions.bench import AGE_MS, Bench


def test_a_member_of_a_group_is_counted_once(bench: Bench) -> None:
    keys = GroupKeys("g", bench.prefix)
    for _ in range(2):
        members = (0, "succeeded", "", 49_999, "failed", "WHY")
        bench.call("executions/group_record", AGE_MS, 10, "c", *members, keys=keys)
    reply = bench.call("executions/group_read", "", 10, 0, keys=keys)
    assert reply[1:3] == [b"", 2]
    assert dict(zip(reply[3:7:2], reply[4:7:2], strict=True)) == {
        b"succeeded": b"1",
        b"failed": b"1",
    }
    assert reply[8:] == [b"WHY"]
    assert bench.call("executions/group_read", reply[7], 10, 0, keys=keys)[7:] == []
    counted = bench.call("executions/group_read", "", 10, 1, keys=keys)[1]
    assert [place for place in range(8 * len(counted)) if has(counted, place)] == [0, 49_999]
    assert_expires(bench, keys.counts, keys.failures, keys.seen)


def assert_expires(bench: Bench, *keys: str) -> None:
    for key in keys:
        assert AGE_MS / 2 < bench.client.pttl(key) <= AGE_MS, key


def has(bits: bytes, place: int) -> bool:
    return bool(bits[place // 8] & 0x80 >> place % 8)


def test_an_unknown_group_is_empty(bench: Bench) -> None:
    reply = bench.call("executions/group_read", "", 10, 1, keys=GroupKeys("g", bench.prefix))
    assert reply == [Code.DONE, b"", 0]
