"""Text of strangers on a terminal: colours may pass, whatever else controls it may not."""

from __future__ import annotations

import re

_SEQUENCE = re.compile(
    r"""
    (?P<colour>\x1b\[[0-9;:]*m)                      # select graphic rendition
    | (?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]               # any other control sequence
    | \x1b[PX^_\]][^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)   # strings: titles, links, clipboards
    | \x1b[ -/]*[0-~]                                # other escapes
    | (?P<line>\r\n?)
    | [\x00-\x08\x0b-\x1f\x7f-\x9f]                  # what is left of C0 and C1
    """,
    re.VERBOSE,
)
_UNFINISHED = re.compile(
    r"(?:\x9b[0-?]*[ -/]*|\x1b(?:\[[0-?]*[ -/]*|[PX^_\]][^\x07\x1b\x9c]*\x1b?|[ -/]*)?|\r)\Z"
)
_MOST_UNFINISHED = 4096
_RESET = "\x1b[0m"


class Cleaner:
    """Cleans text that comes in pieces; a sequence may be cut anywhere between them."""

    def __init__(self) -> None:
        self._rest = ""
        self._is_coloured = False

    def clean(self, text: str) -> str:
        """What of it may be shown now; the start of a sequence waits for its end."""
        text = self._rest + text
        unfinished = _UNFINISHED.search(text)
        cut = len(text)
        if unfinished is not None and len(text) - unfinished.start() <= _MOST_UNFINISHED:
            cut = unfinished.start()
        self._rest = text[cut:]
        return _SEQUENCE.sub(self._kept, text[:cut])

    def end(self) -> str:
        """What has to follow the last piece: colours do not outlive the text."""
        self._rest = ""
        return _RESET if self._is_coloured else ""

    def _kept(self, match: re.Match[str]) -> str:
        if match["colour"]:
            self._is_coloured = match["colour"] not in (_RESET, "\x1b[m")
            return match["colour"]
        return "\n" if match["line"] else ""


def without_controls(text: str) -> str:
    """A whole text of several lines, cleaned."""
    cleaner = Cleaner()
    return cleaner.clean(text) + cleaner.end()


def cleaned(text: str) -> str:
    """A whole text, cleaned; on one line."""
    return " ".join(without_controls(text).split())
