"""Compiling source code like a REPL: statements, and the value of the last expression."""

from __future__ import annotations
import __future__

import _ast
import builtins
import io
import linecache
from collections import OrderedDict
from types import CodeType, ModuleType
from typing import Any, NamedTuple

CO_COROUTINE = 0x80
_MAX_SOURCES = 1000
_MAX_SOURCE_CHARS = 16 * 1024 * 1024
_FUTURES = [getattr(__future__, name) for name in __future__.all_feature_names]


class Cell(NamedTuple):
    """Compiled source: statements, then perhaps one expression that is its value."""

    body: CodeType | None
    tail: CodeType | None

    @property
    def awaits(self) -> bool:
        """Whether it has `await` at its top level, and so needs an event loop."""
        return any(code.co_flags & CO_COROUTINE for code in self if code)


class Compiler:
    """Compiles cells; remembers `from __future__` imports, and sources for tracebacks."""

    def __init__(self) -> None:
        self._flags = _ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        self._sources: OrderedDict[str, int] = OrderedDict()
        self._chars = 0

    def compile(self, source: str, filename: str) -> Cell:
        self._remember(source, filename)
        tree: Any = self._run(source, filename, "exec", _ast.PyCF_ONLY_AST)
        value = tree.body[-1].value if tree.body and type(tree.body[-1]) is _ast.Expr else None
        if value is not None:
            tree.body.pop()
        body = self._run(tree, filename, "exec") if tree.body else None
        if body is not None:
            for feature in _FUTURES:
                self._flags |= body.co_flags & feature.compiler_flag
        tail = None
        if value is not None:
            tail = self._run(_ast.Expression(body=value), filename, "eval")
        return Cell(body, tail)

    def _run(self, source: Any, filename: str, mode: str, extra: int = 0) -> Any:
        return compile(source, filename, mode, flags=self._flags | extra, dont_inherit=True)

    def _remember(self, source: str, filename: str) -> None:
        lines = io.StringIO(source, newline=None).readlines()  # ends as the compiler sees them
        linecache.cache[filename] = (len(source), None, lines, filename)
        self._chars += len(source) - self._sources.pop(filename, 0)
        self._sources[filename] = len(source)
        while len(self._sources) > _MAX_SOURCES or self._chars > _MAX_SOURCE_CHARS:
            if len(self._sources) == 1:
                break
            oldest, size = self._sources.popitem(last=False)
            self._chars -= size
            linecache.cache.pop(oldest, None)


def fresh_main() -> ModuleType:
    """A new `__main__`: the namespace of a session."""
    module = ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    return module


def enter_blocking(cell: Cell, namespace: dict[str, Any]) -> object:
    """Run a blocking cell. The interrupter stops code only below this frame."""
    if cell.body is not None:
        exec(cell.body, namespace)
    if cell.tail is None:
        return None
    return eval(cell.tail, namespace)


async def enter_coroutine(cell: Cell, namespace: dict[str, Any]) -> object:
    """Run a cell that awaits. The interrupter stops code only below this frame."""
    for code in cell:
        if code is None:
            continue
        value = eval(code, namespace)
        if code.co_flags & CO_COROUTINE:
            value = await value
    return value if cell.tail is not None else None
