"""Lines to blocks of source, by the rules of Python's own prompt."""

from __future__ import annotations

import ast
import codeop
import warnings
from collections.abc import Callable

FIRST, NEXT = ">>> ", "... "


class BlockReader:
    """Gathers lines until they are a whole statement.

    A blank line ends a compound statement. So does a line that cannot go on with it, as in a
    pasted script: that one begins the next block.
    """

    def __init__(self, prompt: Callable[[str], str], give_back: Callable[[str], None]) -> None:
        self._prompt = prompt
        self._give_back = give_back
        self._compile = codeop.CommandCompiler()
        self._compile.compiler.flags |= ast.PyCF_ALLOW_TOP_LEVEL_AWAIT

    def read(self) -> str:
        """The next block, or the next line that begins with `:`; EOFError at the end."""
        lines = [self._prompt(FIRST)]
        if lines[0].startswith(":"):
            return lines[0]
        while self._verdict(lines) is None:
            try:
                lines.append(self._prompt(NEXT))
            except EOFError:
                break
            if self._begins_anew(lines):
                self._give_back(lines.pop())
                break
        return "\n".join(lines)

    def _begins_anew(self, lines: list[str]) -> bool:
        *block, last = lines
        if not last or last[0].isspace():
            return False
        return self._verdict(lines) is False and self._verdict([*block, ""]) is True

    def _verdict(self, lines: list[str]) -> bool | None:
        """True for a whole statement, None for the beginning of one, False for neither."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the child compiles it again, and warns
            try:
                code = self._compile("\n".join(lines), symbol="single")
            except (SyntaxError, ValueError, OverflowError, MemoryError, RecursionError):
                return False
        return None if code is None else True
