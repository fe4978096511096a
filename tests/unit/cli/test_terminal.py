"""Text of strangers on a terminal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule_tasks.cli.terminal import Cleaner, cleaned, without_controls

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
def test_what_controls_the_terminal_is_taken_out(sequence: str) -> None:
    assert Cleaner().clean(f"a{sequence}b") == "ab"


@pytest.mark.parametrize("sequence", HOSTILE)
def test_it_is_taken_out_wherever_it_is_cut(sequence: str) -> None:
    for place in range(len(sequence) + 1):
        cleaner = Cleaner()
        text = f"a{sequence}b"
        assert cleaner.clean(text[: place + 1]) + cleaner.clean(text[place + 1 :]) == "ab"


def test_colours_pass_and_end_with_the_text() -> None:
    cleaner = Cleaner()
    assert cleaner.clean("\x1b[31mred") == "\x1b[31mred"
    assert cleaner.end() == "\x1b[0m"
    assert Cleaner().end() == ""


def test_a_line_cannot_be_written_over() -> None:
    assert Cleaner().clean("first\rsecond\r\nthird\n") == "first\nsecond\nthird\n"


def test_a_sequence_that_never_ends_is_not_kept_for_ever() -> None:
    cleaner = Cleaner()
    shown = cleaner.clean("\x1b]0;" + "x" * 10_000)
    assert "\x1b" not in shown
    assert cleaner.clean("y").endswith("y")


@given(st.lists(st.text(alphabet="a[]\x1b0;m\x07\\\r\n\x9bP(", max_size=6)))
def test_nothing_but_colours_ever_passes(pieces: list[str]) -> None:
    cleaner = Cleaner()
    shown = "".join(map(cleaner.clean, pieces))
    without_colours = "".join(part.partition("m")[2] for part in ("m" + shown).split("\x1b["))
    assert not set(without_colours) & {"\x1b", "\x07", "\r", "\x9b"}


def test_a_label_is_one_line() -> None:
    assert cleaned("a\nb\x1b[2Jc") == "a bc"


def test_several_lines_keep_their_breaks_and_lose_what_would_steer_a_terminal() -> None:
    assert without_controls("a\n\x1b]0;title\x07  b\x1b[2J\n") == "a\n  b\n"
