"""The page docs/architecture.md, read by the tests that compare it with the code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"


class Key(NamedTuple):
    """A row of the table of Redis keys."""

    shape: str
    type: str
    writers: tuple[str, ...]
    """Names of scripts; `*` at the end stands for any ending."""
    ttl: str


def tables() -> Iterator[list[list[str]]]:
    """Each table, as its rows of cells; the first row is the head."""
    rows: list[list[str]] = []
    for line in [*PAGE.read_text().splitlines(), ""]:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
        elif rows:
            yield [rows[0], *rows[2:]]
            rows = []


def rows_under(first: str) -> list[list[str]]:
    """The rows of all tables whose first column has this head."""
    return [row for head, *rows in tables() if head[0] == first for row in rows]


def key_rows() -> list[Key]:
    return [
        Key(shape.strip("`"), kind, tuple(re.findall(r"`([\w/*]+)`", writers)), ttl)
        for shape, kind, _, writers, ttl in rows_under("key")
    ]


def blocks(language: str) -> list[str]:
    """The fenced blocks of this language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
