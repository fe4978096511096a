"""How ids become parts of keys."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule_tasks.errors import (
    InvalidId,
    InvalidSetting,
)
from capsule_tasks.storage.keys import SessionKeys, escaped

ids = st.text(st.characters(codec="utf-8"), min_size=1, max_size=40)


@given(ids, ids)
def test_two_ids_have_two_spellings_and_none_can_end_a_tag(one: str, other: str) -> None:
    spellings = [escaped("id", value) for value in (one, other)]
    assert (spellings[0] == spellings[1]) == (one == other)
    assert not set("{}: \n\r\x00") & set(spellings[0])
    keys = SessionKeys(one)
    for key in (keys.items, keys.history, keys.operations, keys.quarantine, keys.staging("op")):
        assert key.startswith(f"capsule:{{S:{spellings[0]}}}:")


@pytest.mark.parametrize("prefix", ["", "a{b", "a}b", "a b", "a\n", "ä", "x" * 129])
def test_a_prefix_that_would_move_keys_to_another_slot_is_refused(prefix: str) -> None:
    with pytest.raises(InvalidSetting, match="prefix"):
        SessionKeys("s", prefix)


def test_an_id_is_measured_in_bytes() -> None:
    escaped("id", "é" * 256)
    with pytest.raises(InvalidId, match="514 bytes"):
        escaped("id", "é" * 257)
