"""The tables in tests/README.md name tests and files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
LINES = [line for line in (TESTS / "README.md").read_text().splitlines() if line.startswith("|")]
ROWS = [
    (group.group(1), name.strip())
    for line in LINES
    for group in re.finditer(r"(?<!\w)(\w+): ([\w, ]+)", line.rpartition("|")[0])
    for name in group.group(2).split(",")
]
FOLDERS = "unit|lua|contract|integration|acceptance|chaos|fixtures"
FILES = sorted(set(re.findall(rf"`((?:{FOLDERS})/[\w./]+)`", "\n".join(LINES))))


def test_the_table_has_rows() -> None:
    assert len(ROWS) > 50
    assert len(FILES) > 50


@pytest.mark.parametrize(("module", "name"), ROWS, ids=lambda part: part)
def test_a_named_test_exists(module: str, name: str) -> None:
    source = (TESTS / "integration" / f"test_{module}.py").read_text()
    assert re.search(rf"def test_{name}\(", source), f"{module}: {name}"


@pytest.mark.parametrize("file", FILES)
def test_a_named_file_exists(file: str) -> None:
    assert (TESTS / file).exists()
