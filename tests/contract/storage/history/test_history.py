"""The contract of every history: Redis 6.2, Valkey 9 and a cluster, awaited and blocking."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from datetime import date
from types import SimpleNamespace
from typing import Any

import pytest

from capsule_tasks.errors import (
    HistoryConflict,
    HistoryFull,
    InvalidId,
    InvalidSetting,
    ItemNotStorable,
    ItemTooLarge,
)
from capsule_tasks.storage import Version
from tests.contract.storage.history.subjects import Subject, opened

STORES = {
    "redis62": "redis62_url",
    "valkey": "valkey_url",
    "cluster": "cluster_url",
}
CORRUPT = (b"\xff\xfe", b"{", b"null", b"7", b'"text"', b"[1]", b'{"a":NaN}', b"", b'{"a":1}{}')


@pytest.fixture(params=[(store, face) for store in STORES for face in ("async", "sync")],
                ids="-".join)  # fmt: skip
async def subject(request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    store, face = request.param
    async with opened(request.getfixturevalue(STORES[store]), face) as subject:
        yield subject


def items(*numbers: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"message {number}"} for number in numbers]


# --- reading -------------------------------------------------------------------------------------


async def test_items_come_back_equal_and_in_the_callers_order(subject: Subject) -> None:
    history = subject.history()
    stored = [
        {"z": 1, "a": [None, True, 1.5, -(2**70), "é\u2028😀\x00"], "m": {"": {}}},
        {"lone": "\ud800"},
        {"duplicate": 1},
        {"duplicate": 1},
    ]
    await history.add_items(stored[:2])
    await history.add_items(stored[2:])
    found = await history.get_items()
    assert found == stored
    assert list(found[0]) == ["z", "a", "m"]


async def test_a_new_history_is_empty(subject: Subject) -> None:
    history = subject.history()
    assert await history.get_items() == []
    assert await history.pop_item() is None
    assert not (await history.info()).exists
    assert (await history.read()).version == Version("0", 0, 0)


@pytest.mark.parametrize(
    ("limit", "found"), [(0, []), (1, [5]), (3, [3, 4, 5]), (9, [1, 2, 3, 4, 5])]
)
async def test_a_limit_is_the_latest_in_order(
    subject: Subject, limit: int, found: list[int]
) -> None:
    history = subject.history()
    await history.add_items(items(1, 2, 3, 4, 5))
    assert await history.get_items(limit) == items(*found)
    assert await history.get_items(limit=limit) == items(*found)


@pytest.mark.parametrize("given", [{"limit": 2}, {}, SimpleNamespace(limit=2), None], ids=repr)
async def test_session_settings_are_a_mapping_or_any_object_with_a_limit(
    subject: Subject, given: Any
) -> None:
    history = subject.history(session_settings=given)
    await history.add_items(items(1, 2, 3))
    expected = items(2, 3) if given else items(1, 2, 3)
    assert await history.get_items() == expected
    assert getattr(history.session_settings, "limit", None) == (2 if given else None)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (3, "an object with the attribute `limit`"),
        (object(), "an object with the attribute `limit`"),
        ({"limt": 3}, "without 'limt'"),
        ({"limit": 3, "x": 1, 2: 0}, "without 'x', 2: `limit` is the only"),
    ],
)
async def test_session_settings_without_a_limit_or_with_more_are_refused_at_once(
    subject: Subject, given: Any, named: str
) -> None:
    """openai-agents refuses unknown settings, too: a mistyped limit is none."""
    with pytest.raises(InvalidSetting, match=f"session_settings.*{named}"):
        subject.history(session_settings=given)


async def test_an_explicit_limit_overrides_the_default(subject: Subject) -> None:
    history = subject.history(session_settings=SimpleNamespace(limit=2))
    await history.add_items(items(1, 2, 3))
    assert await history.get_items() == items(2, 3)
    assert await history.get_items(3) == items(1, 2, 3)
    assert await history.get_items(0) == []
    assert len((await history.read()).items) == 3
    history.session_settings.limit = None
    assert len(await history.get_items()) == 3


@pytest.mark.parametrize("limit", [-1, True, 1.0, "3"])
async def test_an_invalid_limit_is_refused_with_its_value(subject: Subject, limit: Any) -> None:
    with pytest.raises(InvalidSetting, match=repr(limit)):
        await subject.history().get_items(limit)


async def test_a_history_of_many_pieces_is_read_whole(subject: Subject) -> None:
    history = subject.history()
    stored = [{"number": number} for number in range(12_345)]
    await history.add_items(stored)
    assert await history.get_items() == stored
    assert await history.get_items(7_000) == stored[-7_000:]


# --- batches -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    ["text", None, {"when": date(2026, 1, 1)}, {"nan": math.nan}, {"bytes": b""}, {"set": {1}}],
)
async def test_one_item_that_cannot_be_stored_stops_the_whole_batch(
    subject: Subject, bad: Any
) -> None:
    history = subject.history()
    with pytest.raises(ItemNotStorable) as refusal:
        await history.add_items([*items(1, 2), bad])
    assert refusal.value.index == 2
    assert await history.get_items() == []
    assert not (await history.info()).exists


async def test_an_item_nested_without_end_is_refused(subject: Subject) -> None:
    endless: dict[str, Any] = {}
    endless["self"] = endless
    with pytest.raises(ItemNotStorable):
        await subject.history().add_items([endless])


async def test_an_empty_batch_writes_nothing(subject: Subject) -> None:
    history = subject.history()
    await history.add_items([])
    assert not (await history.info()).exists


async def test_limits_of_an_item_and_of_a_history_are_refused_with_their_numbers(
    subject: Subject,
) -> None:
    history = subject.history(max_items=3, max_bytes=200, max_item_bytes=100)
    with pytest.raises(ItemTooLarge, match="over the limit of 100"):
        await history.add_items([{"a": 1}, {"a": "x" * 100}])
    await history.add_items([{"a": 1}, {"a": 2}])
    with pytest.raises(HistoryFull, match="3 items"):
        await history.add_items([{"a": 3}, {"a": 4}])
    with pytest.raises(HistoryFull, match="200 bytes"):
        await subject.history("other", max_bytes=200).add_items([{"a": "x" * 90}] * 3)
    assert await history.get_items() == [{"a": 1}, {"a": 2}]
    version = (await history.read()).version
    with pytest.raises(HistoryFull):
        await history.replace(version, [{"a": 1}] * 4)
    await history.add_items([{"a": 3}])


async def test_the_same_operation_is_done_once(subject: Subject) -> None:
    history, again = subject.history(), subject.history()
    await history.add_items(items(1), operation_id="turn-1")
    await again.add_items(items(1), operation_id="turn-1")
    assert await history.get_items() == items(1)
    assert await history.pop_suffix(items(1), operation_id="turn-1")
    await history.add_items(items(1))
    assert await again.pop_suffix(items(1), operation_id="turn-1")
    assert await history.get_items() == items(1)
    await history.clear_session(operation_id="end")
    await history.add_items(items(2))
    await again.clear_session(operation_id="end")
    assert await history.get_items() == items(2)


async def test_a_pop_that_is_repeated_whole_takes_one_item(subject: Subject) -> None:
    history, again = subject.history(), subject.history()
    await history.add_items(items(1, 2, 3))
    for record in (b"{", b"", b"null"):
        subject.seed(record)
    assert await history.pop_item(operation_id="undo") == items(3)[0]
    assert await again.pop_item(operation_id="undo") == items(3)[0]
    assert await history.get_items() == items(1, 2)
    assert subject.records(subject.keys().quarantine) == [b"null", b"", b"{"]
    assert await again.pop_item(operation_id="undo 2") == items(2)[0]


# --- removing ------------------------------------------------------------------------------------


async def test_nothing_that_was_popped_is_left_after_a_clear(subject: Subject) -> None:
    history = subject.history()
    await history.add_items(items(1, 2, 3))
    assert await history.pop_item(operation_id="undo") == items(3)[0]
    assert await history.pop_item() == items(2)[0]
    assert subject.holds(b"message 3")
    assert subject.holds(b"message 2")
    await history.clear_session()
    assert not subject.holds(b"message")
    await history.add_items(items(4))
    assert await history.pop_item(operation_id="undo") is None, "the repeat took another item"
    assert await history.get_items() == items(4)


async def test_pop_takes_the_tail_until_the_history_is_empty(subject: Subject) -> None:
    history = subject.history()
    await history.add_items(items(1, 2))
    assert await history.pop_item() == items(2)[0]
    assert await history.pop_item() == items(1)[0]
    assert await history.pop_item() is None
    assert (await history.info()).bytes == 0


async def test_clear_leaves_nothing_and_the_next_write_starts_a_new_history(
    subject: Subject,
) -> None:
    history = subject.history()
    await history.add_items(items(1))
    before = await history.read()
    await history.clear_session()
    assert await history.get_items() == []
    assert not (await history.info()).exists
    await history.add_items(items(2))
    assert await history.get_items() == items(2)
    with pytest.raises(HistoryConflict):
        await history.replace(before.version, [])


async def test_a_suffix_goes_whole_or_not_at_all(subject: Subject) -> None:
    history = subject.history()
    await history.add_items(items(1, 2, 3))
    refused = await history.pop_suffix(items(2, 4))
    assert not refused
    assert refused.found == items(2, 3)
    assert not await history.pop_suffix(items(1, 2))
    assert not await history.pop_suffix(items(0, 1, 2, 3))
    assert await history.get_items() == items(1, 2, 3)
    assert await history.pop_suffix([])
    assert await history.pop_suffix(items(2, 3))
    assert await history.get_items() == items(1)


async def test_a_suffix_is_compared_as_json_and_not_as_python(subject: Subject) -> None:
    history = subject.history()
    await history.add_items([{"a": 1, "b": [True]}])
    for similar in ({"a": 1.0, "b": [True]}, {"a": True, "b": [True]}, {"a": 1, "b": [1]}):
        assert not await history.pop_suffix([similar])
    assert await history.pop_suffix([{"b": (True,), "a": 1}])
    assert await history.get_items() == []


async def test_a_suffix_with_a_corrupt_record_in_it_is_not_the_expected_one(
    subject: Subject,
) -> None:
    history = subject.history()
    await history.add_items(items(1))
    subject.seed(b"null")
    refused = await history.pop_suffix(items(1))
    assert not refused
    assert refused.found == []
    assert subject.records(subject.keys().items)[1:] == [b"null"]


# --- replacing -----------------------------------------------------------------------------------


async def test_a_replacement_takes_the_place_of_what_was_read(subject: Subject) -> None:
    history = subject.history()
    await history.add_items(items(1, 2, 3))
    snapshot = await history.read()
    assert snapshot.is_whole
    await history.add_items(items(4))
    await history.replace(snapshot.version, items(100))
    assert await history.get_items() == items(100, 4)
    with pytest.raises(HistoryConflict, match="read it again"):
        await history.replace(snapshot.version, items(200))
    assert await history.get_items() == items(100, 4)


async def test_a_limited_read_replaces_only_what_was_read(subject: Subject) -> None:
    history = subject.history()
    await history.add_items(items(1, 2, 3))
    snapshot = await history.read(2)
    assert not snapshot.is_whole
    await history.add_items(items(4))
    await history.replace(snapshot.version, items(100, 101, 102))
    assert await history.get_items() == items(1, 100, 101, 102, 4)


async def test_a_pop_in_between_is_a_conflict_and_changes_nothing(subject: Subject) -> None:
    history = subject.history()
    await history.add_items(items(1, 2))
    version = (await history.read()).version
    await history.pop_item()
    await history.add_items(items(2))
    with pytest.raises(HistoryConflict):
        await history.replace(version, [])
    assert await history.get_items() == items(1, 2)


async def test_a_replacement_by_nothing_and_of_nothing(subject: Subject) -> None:
    history = subject.history()
    await history.replace((await history.read()).version, items(1))
    assert await history.get_items() == items(1)
    await history.replace((await history.read()).version, [])
    assert await history.get_items() == []
    await history.add_items(items(2))
    assert await history.get_items() == items(2)


async def test_items_of_a_new_history_survive_a_replacement_of_no_items(
    subject: Subject,
) -> None:
    history = subject.history()
    version = (await history.read()).version
    await subject.history().add_items(items(2, 3))
    await history.replace(version, items(1), operation_id="import")
    await history.replace(version, items(1), operation_id="import")
    assert await history.get_items() == items(1, 2, 3)


async def test_a_replacement_in_pieces_is_one_step(subject: Subject) -> None:
    history = subject.history()
    await history.add_items([{"number": number} for number in range(11_000)])
    snapshot = await history.read(10_500)
    await history.add_items([{"late": 1}])
    summary = [{"summary": number} for number in range(10_200)]
    await history.replace(snapshot.version, summary, operation_id="compact")
    await history.replace(snapshot.version, summary, operation_id="compact")
    expected = [*({"number": number} for number in range(500)), *summary, {"late": 1}]
    assert await history.get_items() == expected
    size = sum(map(len, subject.records(subject.keys().items)))
    assert (await history.info()).bytes == size
    assert subject.records(subject.keys().staging("replace:compact")) == []


# --- corrupt records -----------------------------------------------------------------------------


@pytest.mark.parametrize("record", CORRUPT, ids=repr)
async def test_a_corrupt_record_is_skipped_and_counted(subject: Subject, record: bytes) -> None:
    history = subject.history()
    await history.add_items(items(1))
    subject.seed(record)
    await history.add_items(items(2))
    snapshot = await history.read()
    assert snapshot.items == items(1, 2)
    assert snapshot.corrupt == 1
    assert await history.get_items(2) == items(1, 2)
    assert await history.pop_item() == items(2)[0]
    assert await history.pop_item() == items(1)[0]
    assert (await history.info()).quarantined == 1
    assert subject.records(subject.keys().quarantine) == [record]


async def test_corrupt_records_do_not_use_up_the_limit(subject: Subject) -> None:
    history = subject.history()
    await history.add_items(items(1, 2, 3))
    for record in CORRUPT:
        subject.seed(record)
    await history.add_items(items(4))
    subject.seed(b"null")
    snapshot = await history.read(3)
    assert snapshot.items == items(2, 3, 4)
    assert snapshot.corrupt == len(CORRUPT) + 1


async def test_a_replacement_quarantines_what_could_not_be_read(subject: Subject) -> None:
    history = subject.history()
    await history.add_items(items(1))
    subject.seed(b"{")
    await history.add_items(items(2))
    snapshot = await history.read()
    await history.replace(snapshot.version, items(3))
    assert await history.get_items() == items(3)
    assert subject.records(subject.keys().quarantine) == [b"{"]


async def test_the_quarantine_keeps_the_newest(subject: Subject) -> None:
    history = subject.history(max_quarantined=2)
    for record in (b"1", b"2", b"3"):
        subject.seed(record)
    assert await history.pop_item() is None
    assert subject.records(subject.keys().quarantine) == [b"2", b"1"]


# --- times and ids -------------------------------------------------------------------------------


async def test_created_stays_and_updated_grows_with_every_write(subject: Subject) -> None:
    history = subject.history()
    seen = []
    await history.add_items(items(1, 2, 3))
    seen.append(await history.info())
    await history.add_items(items(4))
    seen.append(await history.info())
    await history.pop_item()
    seen.append(await history.info())
    await history.pop_suffix(items(3))
    seen.append(await history.info())
    await history.replace((await history.read()).version, items(9))
    seen.append(await history.info())
    assert len({info.created_at for info in seen}) == 1
    updates = [info.updated_at for info in seen]
    assert updates == sorted(set(updates))
    await history.get_items()
    assert (await history.info()).updated_at == updates[-1]


async def test_metadata_never_shows_up_in_items(subject: Subject) -> None:
    history = subject.history()
    await history.add_items([{}])
    assert await history.get_items() == [{}]
    assert await history.pop_item() == {}


async def test_every_write_sets_the_time_to_live(subject: Subject) -> None:
    history = subject.history(ttl_s=1000)
    await history.add_items(items(1))
    first = (await history.info()).expires_in_s
    assert 900 < first <= 1000
    await subject.history(ttl_s=5000).pop_item()
    assert 4900 < (await history.info()).expires_in_s <= 5000
    await history.get_items()
    assert (await history.info()).expires_in_s > 4900
    await subject.history(ttl_s=9000, renew_on_read=True).get_items()
    assert (await history.info()).expires_in_s > 8900


@pytest.mark.parametrize("ttl_s", [0, -1, math.nan, math.inf, None])
async def test_an_invalid_time_to_live_is_refused(subject: Subject, ttl_s: Any) -> None:
    with pytest.raises(InvalidSetting, match="ttl_s"):
        subject.history(ttl_s=ttl_s)


async def test_odd_ids_do_not_collide(subject: Subject) -> None:
    odd = ["a:b", "a%3Ab", "{a}", "a}", "a\nb", "a b", "é", "a", "a:items", "x" * 512, "a{S:b}"]
    for number, session_id in enumerate(odd):
        await subject.history(session_id).add_items(items(number))
    for number, session_id in enumerate(odd):
        assert await subject.history(session_id).get_items() == items(number)


@pytest.mark.parametrize("session_id", ["", "x" * 513, "é" * 257, "\ud800", 7, None])
async def test_an_id_that_cannot_be_a_key_is_refused(subject: Subject, session_id: Any) -> None:
    with pytest.raises(InvalidId):
        subject.history(session_id)


async def test_close_can_be_repeated(subject: Subject) -> None:
    history = subject.history()
    await history.close()
    await history.close()
    await history.add_items(items(1))  # what was given stays open
