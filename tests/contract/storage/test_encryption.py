"""An encrypted history promises the same, and tells Redis nothing of what is in it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any

import pytest

from capsule_tasks.errors import InvalidSetting, UnknownKey
from capsule_tasks.storage.encryption import EncryptingCodec
from tests.contract.storage.history.subjects import Subject, opened

KEY = b"k" * 32
SECRET = [{"role": "user", "content": "a secret"}, {"role": "user", "content": "another"}]


@pytest.fixture(params=["async", "sync"])
async def subject(request: pytest.FixtureRequest, valkey_url: str) -> AsyncIterator[Subject]:
    async with opened(valkey_url, request.param) as subject:
        yield subject


def sealed(subject: Subject, *keys: bytes, session_id: str = "user-42", **changes: Any) -> Any:
    history = subject.history(session_id, **changes)
    history = getattr(history, "history", history)  # under the suite's own adapter
    return adapted(subject, history.with_codec(EncryptingCodec(*keys)))


def adapted(subject: Subject, history: Any) -> Any:
    wrapper = type(subject.history())
    return wrapper(history) if wrapper.__name__.startswith("Awaited") else history


async def test_an_encrypted_history_reads_the_same_and_redis_sees_no_plain_text(
    subject: Subject,
) -> None:
    history = sealed(subject, KEY)
    await history.add_items(SECRET)
    assert await history.get_items() == SECRET
    raw = b"".join(subject.records(subject.keys().items))
    assert b"secret" not in raw
    assert b"role" not in raw
    assert not await history.pop_suffix(SECRET[:1])
    assert await history.pop_suffix(SECRET[1:])
    assert await history.pop_item() == SECRET[0]
    await history.add_items(SECRET)
    await history.replace((await history.read()).version, SECRET[:1])
    assert await history.get_items() == SECRET[:1]


async def test_equal_items_have_different_records(subject: Subject) -> None:
    await sealed(subject, KEY).add_items([SECRET[0], SECRET[0]])
    assert len(set(subject.records(subject.keys().items))) == 2


async def test_a_new_key_in_front_reads_the_old_and_writes_the_new(subject: Subject) -> None:
    new = os.urandom(32)
    await sealed(subject, KEY).add_items(SECRET[:1])
    changed = sealed(subject, new, KEY)
    await changed.add_items(SECRET[1:])
    assert await changed.get_items() == SECRET
    assert await sealed(subject, new, KEY).pop_item() == SECRET[1]
    with pytest.raises(UnknownKey):
        await sealed(subject, new).get_items()


async def test_a_missing_key_is_an_error_and_quarantines_nothing(subject: Subject) -> None:
    await sealed(subject, KEY).add_items(SECRET)
    other = sealed(subject, b"o" * 32)
    with pytest.raises(UnknownKey):
        await other.get_items()
    with pytest.raises(UnknownKey):
        await other.pop_item()
    assert (await other.info()).quarantined == 0
    assert await sealed(subject, KEY).get_items() == SECRET


async def test_records_that_were_moved_changed_or_never_sealed_are_corrupt(
    subject: Subject,
) -> None:
    history = sealed(subject, KEY)
    await sealed(subject, KEY, session_id="other").add_items(SECRET[:1])
    moved = subject.records(subject.keys("other").items)[0]
    await history.add_items(SECRET[:1])
    mine = subject.records(subject.keys().items)[0]
    flipped = mine[:-4] + (b"A" if mine[-4:-3] != b"A" else b"B") + mine[-3:]
    for record in (moved, flipped, b'{"plain":1}', b'{"capsule_key":"x"', b"{"):
        subject.seed(record)
    await history.add_items(SECRET[1:])
    snapshot = await history.read()
    assert snapshot.items == SECRET
    assert snapshot.corrupt == 5
    assert [await history.pop_item(), await history.pop_item()] == SECRET[::-1]
    assert await history.pop_item() is None
    assert (await history.info()).quarantined == 5


@pytest.mark.parametrize("keys", [(), (b"short",), ("x" * 32,), (KEY, b"")])
def test_keys_of_another_size_are_refused_without_being_shown(keys: Any) -> None:
    with pytest.raises(InvalidSetting) as refusal:
        EncryptingCodec(*keys)
    assert "short" not in str(refusal.value)
