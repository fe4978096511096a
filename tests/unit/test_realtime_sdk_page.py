"""The page on the SDK's realtime tests names tests that exist, and each of the SDK's tests once."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.openai_sdk.checkout import checkout
from tests.openai_sdk.page import matches

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "realtime_sdk.md"
ROW = re.compile(r"^\| (`.+?) \| (.+) \|$", re.MULTILINE)


def tables() -> dict[str, list[tuple[list[str], str]]]:
    """The rows of each file of the SDK: the names of its tests, and what the page says of them."""
    sections = re.split(r"^### `(test_\w+\.py)`$", PAGE.read_text(), flags=re.MULTILINE)
    return {
        file: [
            (re.findall(r"`([^`]+)`", names), ours)
            for names, ours in ROW.findall(text.split("\n## ")[0])
        ]
        for file, text in zip(sections[1::2], sections[2::2], strict=True)
    }


def left_out() -> set[str]:
    section = PAGE.read_text().split("\n## Left out\n")[1]
    return {name for names, _ in ROW.findall(section) for name in re.findall(r"`([^`]+)`", names)}


FILES = sorted(tables())


@cache
def names_in(module: Path) -> frozenset[str]:
    """The names of the tests in a module, also of those in classes."""
    return frozenset(
        node.name
        for node in ast.walk(ast.parse(module.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
    )


def named(ours: str) -> Iterator[tuple[Path, str]]:
    for reference in re.findall(r"`([^`]+::[^`]+)`", ours):
        path, _, test = reference.partition("::")
        yield TESTS / path, test


@pytest.mark.parametrize("file", FILES)
def test_every_row_has_a_test_or_a_reason(file: str) -> None:
    rows = tables()[file]
    assert rows
    for tests, ours in rows:
        assert list(named(ours)) or re.search(r"\*\*differs\*\*: \w", ours), tests
    names = Counter(name for tests, _ in rows for name in tests)
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize("file", FILES)
def test_the_tests_of_ours_exist(file: str) -> None:
    references = [each for _, ours in tables()[file] for each in named(ours)]
    assert [
        f"{path}::{test}"
        for path, test in references
        if not path.is_file() or test not in names_in(path)
    ] == []


@pytest.mark.full
@pytest.mark.parametrize("file", FILES)
def test_every_test_of_the_sdk_is_on_the_page(file: str) -> None:
    """Every test of a file is matched by one name, and every name matches a test."""
    tests = names_in(checkout() / "tests" / "realtime" / file)
    patterns = [name for names, _ in tables()[file] for name in names]
    found = {test: [each for each in patterns if matches(each, test)] for test in tests}
    assert {test: by for test, by in found.items() if len(by) != 1} == {}
    assert [each for each in patterns if not any(matches(each, test) for test in tests)] == []


@pytest.mark.full
def test_every_file_of_the_sdk_is_on_the_page() -> None:
    files = {path.name for path in (checkout() / "tests" / "realtime").glob("test_*.py")}
    assert {*FILES, *left_out()} == files
    assert left_out().isdisjoint(FILES)
