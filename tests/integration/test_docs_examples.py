"""Every Python example of the documentation is run; the settings it lists are the real ones."""

from __future__ import annotations

import ast
import asyncio
import inspect
import os
import re
import traceback
import types
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from capsule_tasks.errors import Unconfined
from capsule_tasks.settings import SandboxSettings, SessionConfig
from capsule_tasks.system.family import descendants
from tests.sessions import HANG_S

ROOT = Path(__file__).parents[2]
PAGES = {
    str(path.relative_to(ROOT)): path
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
}
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)")
NOT_RUN = re.compile(r"<!-- not run: \S.* -->")


class Example(NamedTuple):
    line: int
    source: str


def examples(page: str) -> list[Example]:
    """The Python blocks of a page, except those after a comment that excludes them."""
    found: list[Example] = []
    lines = page.splitlines()
    number = 0
    while number < len(lines):
        fence = FENCE.match(lines[number])
        if fence is None:
            number += 1
            continue
        end = lines.index(f"{fence['indent']}```", number + 1)
        is_run = not (number and NOT_RUN.fullmatch(lines[number - 1].strip()))
        if fence["language"] in ("py", "python3", "pycon"):
            raise ValueError(f"line {number + 1}: write ```python, so that the example is run")
        if fence["language"] == "python" and is_run:
            indent = len(fence["indent"])
            source = "\n".join(line[indent:] for line in lines[number + 1 : end])
            found.append(Example(number + 1, source))
        number = end + 1
    return found


def run_page(page: str, name: str) -> None:
    """Run a page from top to bottom like `python -m asyncio`: one namespace, one event loop."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with asyncio.Runner() as runner:
        for example in examples(page):
            tree = ast.parse(example.source, name)
            ast.increment_lineno(tree, example.line)
            code = compile(tree, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            ended = types.FunctionType(code, namespace)()
            if inspect.iscoroutine(ended):
                runner.run(asyncio.wait_for(ended, HANG_S))


@pytest.mark.parametrize("path", PAGES.values(), ids=PAGES.keys())
def test_the_examples_of_a_page_run(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, valkey_url: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REDIS_URL", valkey_url)
    before = set(descendants(os.getpid()))
    try:
        run_page(path.read_text(), path.name)
    except Unconfined as missing:
        pytest.skip(f"this machine cannot confine a sandbox: {missing}")
    assert set(descendants(os.getpid())) <= before


def test_there_are_examples_to_run() -> None:
    counts = {name: len(examples(path.read_text())) for name, path in PAGES.items()}
    assert counts["README.md"] >= 1
    assert counts["docs/session.md"] >= 10


def test_an_example_that_fails_is_reported_with_its_place() -> None:
    first = "```python\nimport asyncio\nx = 1\n```\n"
    second = "```python\nawait asyncio.sleep(0)\nassert x == 2\n```\n"
    with pytest.raises(AssertionError) as failure:
        run_page(f"text\n\n{first}\n{second}", "page.md")
    place = traceback.extract_tb(failure.tb)[-1]
    assert (place.filename, place.lineno) == ("page.md", 10)


def test_only_a_comment_with_a_reason_keeps_an_example_from_running() -> None:
    block = "```python\nraise SystemError\n```\n"
    run_page(f"<!-- not run: it takes an hour -->\n{block}", "page.md")
    for comment in ("<!-- not run: -->", "<!-- not run -->", "text"):
        with pytest.raises(SystemError):
            run_page(f"{comment}\n{block}", "page.md")
    with pytest.raises(ValueError, match="line 1"):
        run_page(block.replace("python", "py"), "page.md")


# --- the table of settings -----------------------------------------------------------------------


def test_the_guide_lists_every_setting_with_its_default() -> None:
    section = (ROOT / "docs" / "session.md").read_text().partition("\n## Settings\n")[2]
    section = section.partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w.]+)` \| (.+?) \| (.+) \|$", section, re.MULTILINE)
    assert {name: default for name, default, _ in rows} == dict(defaults(SessionConfig, ""))


def defaults(section: type[msgspec.Struct], prefix: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for field in msgspec.structs.fields(section):
        name = prefix + field.name
        if isinstance(field.default, msgspec.Struct):
            found += defaults(type(field.default), f"{name}.")
            continue
        found.append((name, as_written(field.name, field.default)))
        if name == "child.sandbox":
            found += defaults(SandboxSettings, f"{name}.")
    return found


def as_written(name: str, value: object) -> str:
    if name == "python":
        return "`sys.executable`"
    if value is None or value == ():
        return "none"
    if isinstance(value, tuple):
        return ", ".join(f"`{item}`" for item in value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"`{value}`"
    if name.endswith("_bytes") and isinstance(value, int):
        return f"{value >> 20} MiB" if value % 2**20 == 0 else f"{value >> 10} KiB"
    return f"{value:g} s" if name.endswith("_s") else str(value)
