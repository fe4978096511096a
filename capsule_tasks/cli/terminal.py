"""Removes the control sequences from text that a task wrote, except for colours."""

from __future__ import annotations

import re

_SEQUENCE = re.compile(
    r"""
    (?P<colour>\x1b\[[0-9;:]*m)                      # select graphic rendition
    | (?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]               # any other control sequence
    | \x1b[PX^_\]][^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)   # strings: titles, links, clipboards
    | \x1b[ -/]*[0-~]                                # other escapes
    | (?P<line>\r\n?)
    | [\x00-\x08\x0b-\x1f\x7f-\x9f]                  # the rest of C0 and C1
    """,
    re.VERBOSE,
)
_ORDER = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Characters that change the order in which others are shown: what a person reads, and approves,
could differ from what is there."""
_UNFINISHED = re.compile(
    r"(?:\x9b[0-?]*[ -/]*|\x1b(?:\[[0-?]*[ -/]*|[PX^_\]][^\x07\x1b\x9c]*\x1b?|[ -/]*)?|\r)\Z"
)
_MAX_UNFINISHED = 4096
_RESET = "\x1b[0m"


class ControlSequenceFilter:
    """Filters text that comes in pieces; a sequence may be cut anywhere between two pieces."""

    def __init__(self) -> None:
        self._buffered = ""
        self._is_coloured = False

    def feed(self, text: str) -> str:
        """The text to show now; the start of a sequence is buffered until its end arrives."""
        text = self._buffered + text
        unfinished = _UNFINISHED.search(text)
        cut = len(text)
        if unfinished is not None and len(text) - unfinished.start() <= _MAX_UNFINISHED:
            cut = unfinished.start()
        self._buffered = text[cut:]
        return _SEQUENCE.sub(self._replacement, text[:cut])

    def end(self) -> str:
        """The text to show after the last piece: it resets a colour that is still on."""
        self._buffered = ""
        return _RESET if self._is_coloured else ""

    def _replacement(self, match: re.Match[str]) -> str:
        if match["colour"]:
            self._is_coloured = match["colour"] not in (_RESET, "\x1b[m")
            return match["colour"]
        return "\n" if match["line"] else ""


def without_controls(text: str) -> str:
    """A complete text without control sequences; line breaks stay."""
    controls = ControlSequenceFilter()
    return controls.feed(text) + controls.end()


def cleaned(text: str) -> str:
    """A complete text on one line, without control sequences and changes of its order."""
    return _ORDER.sub("", " ".join(without_controls(text).split()))
