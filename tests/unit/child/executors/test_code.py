"""Source as a REPL understands it: the value of the last expression, await, futures, sources."""

from __future__ import annotations
import __future__

import asyncio
import linecache
import traceback
from collections.abc import Iterator
from typing import Any

import pytest

from capsule_tasks.child.executors import code
from capsule_tasks.child.executors.code import (
    Compiler,
    enter_blocking,
    enter_coroutine,
    fresh_main,
)


@pytest.fixture
def compiler() -> Iterator[Compiler]:
    """A compiler whose sources leave the line cache with the test."""
    before = set(linecache.cache)
    yield Compiler()
    for name in set(linecache.cache) - before:
        linecache.cache.pop(name, None)


def run(compiler: Compiler, source: str, namespace: dict[str, Any] | None = None) -> Any:
    space = fresh_main().__dict__ if namespace is None else namespace
    cell = compiler.compile(source, "<test>")
    if cell.awaits:
        return asyncio.run(enter_coroutine(cell, space))
    return enter_blocking(cell, space)


VALUES = {
    "": None,
    "# nothing": None,
    "1 + 1": 2,
    "x = 5": None,
    "x = 5\nx * 2": 10,
    "x = 5; x": 5,
    "1; 2; 3": 3,
    "for n in range(3):\n    n": None,
    "if True:\n    5": None,
    "def f():\n    return 7\n\nf()": 7,
    "(1,\n 2)": (1, 2),
    "'''a\nb'''": "a\nb",
    "x = y = 3\nx == y": True,
    "print": print,
    "None": None,
    "...": ...,
    "(yes := 4)": 4,
    "lambda: 0; 9": 9,
    "x: int = 3\nx": 3,
    "[n async for n in a()] if False else 1": 1,
    "[x for x in range(3)]": [0, 1, 2],
    "5\n\n\n# the end\n": 5,
    "5;": 5,
    "x = 1\r\nx + 1\r\n": 2,
    "x = 1\rx + 1": 2,
}


@pytest.mark.parametrize(("source", "value"), VALUES.items(), ids=map(ascii, VALUES))
def test_the_value_is_that_of_a_trailing_expression(
    compiler: Compiler, source: str, value: Any
) -> None:
    assert run(compiler, source) == value


def test_a_trailing_expression_is_evaluated_once_and_after_what_is_before_it(
    compiler: Compiler,
) -> None:
    calls: list[str] = []
    space = {"call": calls.append}
    run(compiler, "call('first')\ncall('second')\ncall('last')", space)
    assert calls == ["first", "second", "last"]


def test_a_failing_statement_keeps_the_expression_from_being_evaluated(compiler: Compiler) -> None:
    calls: list[str] = []
    with pytest.raises(ZeroDivisionError):
        run(compiler, "1/0\ncall()", {"call": lambda: calls.append("called")})
    assert calls == []


AWAITING = {
    "await a()": 1,
    "x = await a()": None,
    "x = await a()\nx": 1,
    "1; await a()": 1,
    "async with c() as v:\n    pass\nv": 2,
    "t = 0\nasync for n in g():\n    t += n\nt": 3,
    "[n async for n in g()]": [1, 2],
    "sum([await a() for _ in range(3)])": 3,
    "f'{await a()}'": "1",
    "x = await a()\nlambda: x": ...,
}
HELPERS = """
import contextlib
async def a(): return 1
async def g():
    yield 1
    yield 2
@contextlib.asynccontextmanager
async def c(): yield 2
"""


@pytest.mark.parametrize(("source", "value"), AWAITING.items(), ids=AWAITING)
def test_await_at_the_top_level_needs_an_event_loop(
    compiler: Compiler, source: str, value: Any
) -> None:
    space = fresh_main().__dict__
    run(compiler, HELPERS, space)
    assert compiler.compile(source, "<test>").awaits
    result = run(compiler, source, space)
    assert value is ... or result == value


@pytest.mark.parametrize(
    "source",
    [
        "1",
        HELPERS,
        "async def f():\n    await a()\nf",
        "lambda: (yield)",
        "def f():\n    async def g():\n        await a()\n    return g",
        "'await'",
    ],
)
def test_without_await_at_the_top_level_it_is_blocking_code(
    compiler: Compiler, source: str
) -> None:
    assert not compiler.compile(source, "<test>").awaits


def test_a_coroutine_that_is_not_awaited_is_a_value_like_any_other(compiler: Compiler) -> None:
    space = fresh_main().__dict__
    run(compiler, HELPERS, space)
    value = run(compiler, "a()", space)
    assert asyncio.iscoroutine(value)
    assert asyncio.run(value) == 1


@pytest.mark.parametrize("source", ["return 1", "yield 1", "1 +", "x = = 1", "\0", "  1\n 2"])
def test_a_source_that_is_not_python_is_a_syntax_error(compiler: Compiler, source: str) -> None:
    with pytest.raises(SyntaxError):
        compiler.compile(source, "<test>")


# --- futures -----------------------------------------------------------------------------------

ANNOTATED = "def f(x: undefined_name): ...\nf.__annotations__['x']"


def test_a_future_import_holds_for_its_own_cell_and_all_later_ones(compiler: Compiler) -> None:
    with pytest.raises(NameError):
        run(compiler, ANNOTATED)
    assert run(compiler, f"from __future__ import annotations\n{ANNOTATED}") == "undefined_name"
    assert run(compiler, ANNOTATED) == "undefined_name"


def test_a_future_of_one_session_is_not_that_of_another(compiler: Compiler) -> None:
    run(compiler, "from __future__ import annotations")
    with pytest.raises(NameError):
        run(Compiler(), ANNOTATED)


def test_the_futures_of_this_package_are_not_the_users(compiler: Compiler) -> None:
    assert compiler.flags & __future__.annotations.compiler_flag == 0


def test_a_future_that_does_not_exist_changes_nothing(compiler: Compiler) -> None:
    with pytest.raises(SyntaxError):
        run(compiler, "from __future__ import braces")
    with pytest.raises(NameError):
        run(compiler, ANNOTATED)


# --- sources -----------------------------------------------------------------------------------


def quoted(compiler: Compiler, source: str, name: str = "<test>") -> list[str]:
    """The lines that the traceback of a failing cell quotes."""
    try:
        enter_blocking(compiler.compile(source, name), fresh_main().__dict__)
    except ZeroDivisionError as error:
        frames = traceback.extract_tb(error.__traceback__)
        return [frame.line or "" for frame in frames if frame.filename == name]
    raise AssertionError("it did not fail")


def test_a_traceback_quotes_the_source(compiler: Compiler) -> None:
    assert quoted(compiler, "x = 0\n1 / x  # here") == ["1 / x  # here"]
    assert quoted(compiler, "def f():\n    return 1 / 0\nf()") == ["f()", "return 1 / 0"]


@pytest.mark.parametrize("odd", ["\u2028", "\x0b", "\x0c", "\x1c", "\x85"], ids=ascii)
def test_lines_are_those_of_the_compiler(compiler: Compiler, odd: str) -> None:
    """Other characters that some call line ends, inside text, do not shift the lines quoted."""
    assert quoted(compiler, f"s = 'a{odd}b'\n1 / 0") == ["1 / 0"]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"], ids=ascii)
def test_every_line_end_of_python_is_one(compiler: Compiler, end: str) -> None:
    assert quoted(compiler, f"x = 0{end}{end}1 / x{end}") == ["1 / x"]


def test_a_cell_that_does_not_compile_is_quoted_too(compiler: Compiler) -> None:
    with pytest.raises(SyntaxError) as caught:
        compiler.compile("x = 1\nx ==== 2", "<test>")
    assert (caught.value.text or "").rstrip() == "x ==== 2"
    assert linecache.getline("<test>", 2).rstrip() == "x ==== 2"


def test_sources_survive_a_check_of_the_line_cache(compiler: Compiler) -> None:
    compiler.compile("x = 1", "<test>")
    linecache.checkcache()
    assert linecache.getline("<test>", 1).rstrip() == "x = 1"


def kept(compiler: Compiler) -> list[str]:
    return [name for name in linecache.cache if name.startswith("<n")]


def test_the_newest_sources_are_kept_up_to_a_number(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code, "_MAX_SOURCES", 3)
    for number in range(10):
        compiler.compile(f"x = {number}", f"<n{number}>")
    assert kept(compiler) == ["<n7>", "<n8>", "<n9>"]


def test_the_newest_sources_are_kept_up_to_a_size(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code, "_MAX_SOURCE_CHARS", 100)
    for number in range(10):
        compiler.compile("#" * 40, f"<n{number}>")
    assert kept(compiler) == ["<n8>", "<n9>"]
    compiler.compile("#" * 1000, "<n10>")
    assert kept(compiler) == ["<n10>"], "the one that runs is kept, whatever its size"


def test_a_name_used_again_is_counted_once_and_is_the_newest(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code, "_MAX_SOURCES", 2)
    monkeypatch.setattr(code, "_MAX_SOURCE_CHARS", 100)
    for name in ("<na>", "<nb>", "<na>", "<na>", "<na>"):
        compiler.compile("#" * 30, name)
    assert sorted(kept(compiler)) == ["<na>", "<nb>"]
    compiler.compile("#", "<nc>")
    assert sorted(kept(compiler)) == ["<na>", "<nc>"]


def test_a_new_main_looks_like_the_one_of_a_script() -> None:
    module = fresh_main()
    assert module.__name__ == "__main__"
    assert enter_blocking(Compiler().compile("__name__, len('ab')", "<test>"), vars(module)) == (
        "__main__",
        2,
    )
