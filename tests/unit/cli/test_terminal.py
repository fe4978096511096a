"""Text of tasks and other programs on a terminal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule_tasks.cli.terminal import ControlSequenceFilter, cleaned, without_controls

HOSTILE = [
    "\x1b]0;title\x07",
    "\x1b]8;;http://x\x1b\\",
    "\x1b]52;c;AAAA\x07",
    "\x1bP1$r\x1b\\",
    "\x1b[2J",
    "\x1b[1;1H",
    "\x1b[?1049h",
    "\x1b[6n",
    "\x1bc",
    "\x1b(0",
    "\x07",
    "\x08",
    "\x7f",
    "\x9b2J",
]


@pytest.mark.parametrize("sequence", HOSTILE)
def test_control_sequences_are_removed(sequence: str) -> None:
    assert ControlSequenceFilter().feed(f"a{sequence}b") == "ab"


@pytest.mark.parametrize("sequence", HOSTILE)
def test_a_control_sequence_is_removed_wherever_it_is_cut(sequence: str) -> None:
    for cut in range(1, len(sequence) + 2):
        controls = ControlSequenceFilter()
        text = f"a{sequence}b"
        assert controls.feed(text[:cut]) + controls.feed(text[cut:]) == "ab"


def test_colours_pass_and_end_with_the_text() -> None:
    controls = ControlSequenceFilter()
    assert controls.feed("\x1b[31mred") == "\x1b[31mred"
    assert controls.end() == "\x1b[0m"
    assert ControlSequenceFilter().end() == ""


def test_a_line_cannot_be_overwritten() -> None:
    assert ControlSequenceFilter().feed("first\rsecond\r\nthird\n") == "first\nsecond\nthird\n"


def test_a_sequence_that_never_ends_is_not_buffered_without_limit() -> None:
    controls = ControlSequenceFilter()
    shown = controls.feed("\x1b]0;" + "x" * 10_000)
    assert "\x1b" not in shown
    assert controls.feed("y").endswith("y")


@given(st.lists(st.text(alphabet="a[]\x1b0;m\x07\\\r\n\x9bP(", max_size=6)))
def test_only_colours_pass(pieces: list[str]) -> None:
    controls = ControlSequenceFilter()
    shown = "".join(map(controls.feed, pieces))
    without_colours = "".join(part.partition("m")[2] for part in ("m" + shown).split("\x1b["))
    assert not set(without_colours) & {"\x1b", "\x07", "\r", "\x9b"}


def test_cleaned_text_is_one_line() -> None:
    assert cleaned("a\nb\x1b[2Jc") == "a bc"


def test_cleaned_text_is_shown_in_its_order() -> None:
    assert cleaned('{"to": "\u202eeve\u202c", "for": "\u2066bob\u2069"}') == (
        '{"to": "eve", "for": "bob"}'
    )


def test_text_of_several_lines_keeps_its_breaks() -> None:
    assert without_controls("a\n\x1b]0;title\x07  b\x1b[2J\n") == "a\n  b\n"
