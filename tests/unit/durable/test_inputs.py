"""The first snapshot of a run."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

from capsule_tasks.durable import RunInput, first_snapshot, input_of
from capsule_tasks.errors import InvalidRunState, InvalidSetting


class Message(BaseModel):
    role: str
    content: str


@pytest.mark.parametrize("context", [None, {"plan": "pro"}, [1, 2.5, True]])
def test_an_input_comes_back(context: Any) -> None:
    assert input_of(first_snapshot("hello", context)) == RunInput("hello", context)
    items = [{"role": "user", "content": "hello"}, Message(role="user", content="again")]
    assert input_of(first_snapshot(items, context)).input == [
        {"role": "user", "content": "hello"},
        {"role": "user", "content": "again"},
    ]


@pytest.mark.parametrize(
    ("given", "context", "error"),
    [
        ("", None, "input = ''"),
        ([], None, r"input = \[\]"),
        (b"x", None, "input = b'x'"),
        ([object()], None, "input .* no value of type object"),
        ("x", {"a": object()}, "context .* no value of type object"),
        ("x", {1: {(2, 3): 4}}, "context"),
    ],
)
def test_what_cannot_be_an_input_is_refused(given: Any, context: Any, error: str) -> None:
    with pytest.raises(InvalidSetting, match=error):
        first_snapshot(given, context)


@pytest.mark.parametrize("snapshot", [b"", b"[]", b'{"input": 7}', b"{"])
def test_what_is_no_input_is_refused(snapshot: bytes) -> None:
    with pytest.raises(InvalidRunState):
        input_of(snapshot)
