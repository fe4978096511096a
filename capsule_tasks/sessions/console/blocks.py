"""Lines to blocks of source, by the rules of Python's own prompt."""

from __future__ import annotations

import ast
import codeop
import functools
import warnings
from typing import Literal

State = Literal["incomplete", "complete", "overrun"]


class Block:
    """A statement or a `:command` that grows line by line.

    A blank line ends a compound statement. So does a line that cannot belong to it, as in a
    pasted script: the state is then `overrun`, and the line is the first of the next block.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []

    @property
    def source(self) -> str:
        return "\n".join(self.lines)

    def add(self, line: str) -> State:
        if not self.lines and line.startswith(":"):
            self.lines.append(line)
            return "complete"
        is_valid = _is_valid("\n".join([*self.lines, line]))
        starts_statement = bool(line) and not line[0].isspace()
        if self.lines and is_valid is False and starts_statement and _is_valid(f"{self.source}\n"):
            return "overrun"
        self.lines.append(line)
        return "incomplete" if is_valid is None else "complete"


def is_complete(text: str) -> bool:
    """Whether the last of the blocks in `text` has its end."""
    block = Block()
    state: State = "incomplete"
    for line in text.split("\n"):
        if state == "complete":
            block = Block()
        state = block.add(line)
        if state == "overrun":
            block = Block()
            state = block.add(line)
    return state == "complete"


@functools.lru_cache(maxsize=1024)  # `is_complete` compiles every first line of a block again
def _is_valid(source: str) -> bool | None:
    """True for whole statements, None for the beginning of one, False for neither."""
    compiler = codeop.CommandCompiler()
    compiler.compiler.flags |= ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the child compiles it again, and warns
        try:
            code = compiler(source, symbol="single")
        except (SyntaxError, ValueError, OverflowError, MemoryError, RecursionError):
            return False
    return None if code is None else True
