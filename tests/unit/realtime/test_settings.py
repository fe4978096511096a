"""Settings of realtime sessions are refused where they are made, if they are wrong."""

from __future__ import annotations

import re
from typing import Any

import pytest

from capsule_tasks.errors import InvalidSetting
from capsule_tasks.realtime.settings import RealtimeSettings


@pytest.mark.parametrize(
    ("field", "value", "must"),
    [
        ("voice", 5, "of type str or a mapping of str to Any, or None"),
        ("modalities", "text", "a tuple of 'text' or 'audio' or a list of"),
        ("modalities", ("text", "smell"), "a tuple of 'text' or 'audio' or a list of"),
        ("speed", "x", "of type int or float, or None"),
        ("speed", True, "of type int or float, or None"),
        ("transcription", "on", "a mapping of str to Any or one of 'off', or None"),
        ("max_output_tokens", 1.5, "of type int or one of 'inf', or None"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value(field: str, value: Any, must: str) -> None:
    named = re.escape(f"RealtimeSettings.{field} = {value!r}")
    with pytest.raises(InvalidSetting, match=f"{named}.*{re.escape(must)}"):
        RealtimeSettings(**{field: value})


def test_all_that_the_annotations_allow_is_taken() -> None:
    named = {"model": "m", "voice": {"id": "v"}, "input_format": "pcm16", "tracing": "auto"}
    for speed, modalities in [(1, ("text", "audio")), (1.5, ["text"])]:
        settings = RealtimeSettings(
            modalities=modalities, speed=speed, max_output_tokens="inf", **named
        )
        assert settings.over(RealtimeSettings(speed=3)) == settings
