"""Items as JSON, and records that are unreadable."""

from __future__ import annotations

import contextlib
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule_tasks.storage.codec import Unreadable, canonical, decoded, encoded

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False).filter(
        math.isfinite
    ),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip
objects = st.dictionaries(st.text(), json_values, max_size=5)


@given(objects)
def test_json_values_survive_a_round_trip(item: dict[str, Any]) -> None:
    found = decoded(encoded(item))
    assert found == item
    assert canonical(found) == canonical(item)
    assert list(found) == list(item)


@given(st.binary(max_size=60))
def test_no_bytes_do_more_than_be_unreadable(record: bytes) -> None:
    with contextlib.suppress(Unreadable):
        assert isinstance(decoded(record), dict)


@pytest.mark.parametrize("text", ['{"a": 1}', ' {"a":1} ', '{"a":1,"a":2}', "{}", '{"a":1e400}'])
def test_any_spelling_of_an_object_is_readable(text: str) -> None:
    assert decoded(text.encode()) == json.loads(text)


def test_deep_nesting_is_refused_when_written_and_skipped_when_read() -> None:
    item: dict[str, Any] = {}
    for _ in range(100_000):
        item = {"a": item}
    with pytest.raises(ValueError, match="nested"):
        encoded(item)
    with pytest.raises(Unreadable):
        decoded(b'{"a":' * 100_000 + b"1" + b"}" * 100_000)
