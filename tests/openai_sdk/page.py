"""What `docs/sdk_tests.md` lists: files that are run, and tests that are known to fail."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "sdk_tests.md"


def files() -> list[str]:
    """The files of the SDK's tests that are run."""
    block = re.search(r"^```files\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert block is not None
    return block[1].split()


def listed(heading: str) -> list[str]:
    """The tests in the tables below a heading: `file::name`, where `*` stands for any text.

    A file without a name is not run.
    """
    section = PAGE.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.+?) \|", section, re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def matches(pattern: str, test: str) -> bool:
    spelled = ".*".join(re.escape(part) for part in pattern.split("*"))
    return re.fullmatch(rf"{spelled}(\[.*\])?", test, re.DOTALL) is not None
