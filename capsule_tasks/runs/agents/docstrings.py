"""Descriptions of functions and parameters, from docstrings in Google, NumPy and reST style."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, field
from itertools import pairwise, takewhile

_REST_FIELD = re.compile(r":(\w+)(?:\s+[^:]*?)?(?:\s*(\*{0,2}\w+))?\s*:(?:\s+(.*)|\s*)$")
_GOOGLE_ENTRY = re.compile(r"(\*{0,2}\w+)\s*(?:\(.*?\))?\s*:(?:\s+(.*)|\s*)$")
_NUMPY_ENTRY = re.compile(r"(\*{0,2}\w+(?:\s*,\s*\*{0,2}\w+)*)\s*(?::.*)?$")
_PARAMETERS = frozenset(
    {"args", "arguments", "params", "parameters", "keyword args", "keyword arguments"}
    | {"other parameters"}
)
_SECTIONS = _PARAMETERS | frozenset(
    {"returns", "return", "yields", "raises", "warns", "warnings", "example", "examples", "note"}
    | {"notes", "attributes", "see also", "references", "todo", "methods", "receives"}
)
_REST_PARAMETERS = frozenset({"param", "parameter", "arg", "argument", "key", "keyword"})
_REST_FIELDS = _REST_PARAMETERS | frozenset(
    {"type", "returns", "return", "rtype", "raises", "raise", "except", "exception", "yields"}
)


@dataclass
class Documentation:
    """The text of a docstring before its sections, and what it says of each parameter."""

    text: str = ""
    parameters: dict[str, str] = field(default_factory=dict)


def read_docstring(docstring: str | None) -> Documentation:
    """The documentation of a function; of an odd docstring as much as can be understood."""
    lines = inspect.cleandoc(docstring or "").splitlines()
    starts = [at for at in range(len(lines)) if _begins_section(lines, at)]
    found = Documentation("\n".join(lines[: starts[0]] if starts else lines).strip())
    for start, end in pairwise([*starts, len(lines)]):
        head, body = lines[start], lines[start + 1 : end]
        if head.startswith(":"):
            _read_rest_field([head, *body], found)
        elif _title(head) in _PARAMETERS:
            if body and _is_underline(body[0]):
                _read_entries(body[1:], _NUMPY_ENTRY, found)
            else:
                indented = takewhile(lambda line: not line or line[0].isspace(), body)
                _read_entries(list(indented), _GOOGLE_ENTRY, found)
    return found


def _begins_section(lines: list[str], at: int) -> bool:
    line, below = lines[at], lines[at + 1] if at + 1 < len(lines) else ""
    if line.startswith(":"):
        matched = _REST_FIELD.match(line)
        return matched is not None and matched[1] in _REST_FIELDS
    if _title(line) not in _SECTIONS or line[:1].isspace():
        return False
    return _is_underline(below) or (line.rstrip().endswith(":") and below[:1].isspace())


def _title(line: str) -> str:
    return line.strip().removesuffix(":").lower()


def _is_underline(line: str) -> bool:
    return len(line.strip()) >= 3 and set(line.strip()) == {"-"}


def _read_rest_field(lines: list[str], found: Documentation) -> None:
    matched = _REST_FIELD.match(lines[0])
    assert matched is not None
    if matched[1] in _REST_PARAMETERS and matched[2]:
        _add(found, matched[2], [matched[3] or "", *lines[1:]])


def _read_entries(lines: list[str], entry: re.Pattern[str], found: Documentation) -> None:
    """Read entries that all begin at one column; what is further to the right belongs to them."""
    column = min((_column(line) for line in lines if line.strip()), default=0)
    names, text = "", list[str]()
    for line in lines:
        matched = entry.match(line.strip()) if _column(line) == column else None
        if matched is not None:
            _add(found, names, text)
            names = matched[1]
            text = [matched[2] or ""] if entry is _GOOGLE_ENTRY else []
        else:
            text.append(line)
    _add(found, names, text)


def _column(line: str) -> int:
    return len(line) - len(line.lstrip())


def _add(found: Documentation, names: str, lines: list[str]) -> None:
    text = " ".join(filter(None, (line.strip() for line in lines)))
    for name in re.findall(r"\w+", names):
        if text:
            found.parameters.setdefault(name, text)
