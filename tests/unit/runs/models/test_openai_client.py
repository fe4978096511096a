"""Errors of servers: whether another attempt may help, and when."""

from __future__ import annotations

import sys
import time
from email.utils import formatdate
from typing import Any

import pytest

from capsule_tasks.errors import InvalidSetting
from capsule_tasks.runs.models.openai_client import (
    OpenAIClients,
    failure_of_reply,
    is_retryable,
    retry_after_s,
)
from capsule_tasks.runs.models.openai_responses import OpenAIResponses


@pytest.mark.parametrize(
    ("headers", "expected_s"),
    [
        ({}, None),
        ({"retry-after": "2"}, 2),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),
        ({"retry-after-ms": "soon", "retry-after": "9"}, 9),
        ({"retry-after": "-3"}, 0),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "soon"}, None),
        ({"retry-after": formatdate(0)}, 0),
    ],
)
def test_the_pause_that_a_server_asks_for(
    headers: dict[str, str], expected_s: float | None
) -> None:
    assert retry_after_s(headers) == expected_s


def test_a_pause_until_a_date() -> None:
    pause_s = retry_after_s({"retry-after": formatdate(time.time() + 1000)})
    assert pause_s is not None
    assert 900 < pause_s <= 1000


@pytest.mark.parametrize(
    ("status", "code", "headers", "expected"),
    [
        (408, None, {}, True),
        (409, None, {}, True),
        (429, None, {}, True),
        (429, "insufficient_quota", {}, False),
        (500, None, {}, True),
        (503, None, {"x-should-retry": "false"}, False),
        (400, None, {"x-should-retry": "true"}, True),
        (400, None, {}, False),
        (401, "invalid_api_key", {}, False),
    ],
)
def test_which_refusals_may_end(
    status: int, code: str | None, headers: dict[str, str], expected: bool
) -> None:
    assert is_retryable(status, code, headers) is expected


def test_the_failure_that_a_reply_reports() -> None:
    failure = failure_of_reply("m", "rate_limit_exceeded", "slow down")
    assert (failure.why, failure.is_retryable) == ("rate_limit_exceeded: slow down", True)
    assert not failure_of_reply("m", None, "odd").is_retryable


async def test_without_the_extra_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(ImportError, match=r"pip install 'capsule-tasks\[openai\]'"):
        await OpenAIClients().current()


def test_a_client_and_a_place_are_not_given_together() -> None:
    given: Any = object()
    with pytest.raises(InvalidSetting, match="which has its own"):
        OpenAIResponses("m", client=given, base_url="http://localhost")
