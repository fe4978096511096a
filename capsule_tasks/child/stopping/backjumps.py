"""Raising from a signal handler where the `try` around a loop can see it.

A busy loop handles a signal at its jump backwards. CPython (3.11 to 3.13, each for other loops)
takes an exception that a handler raises there for one raised before the loop. If the loop is the
first statement of a `try`, its `finally` and `except` are then skipped. An exception that is raised
one instruction later finds them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

_jumps: set[int] = set()


def prepare() -> None:
    """Import `opcode` ahead: the code that a handler interrupts may hold its import lock."""
    if not _jumps:
        from opcode import opmap

        _jumps.update(number for name, number in opmap.items() if "JUMP_BACKWARD" in name)


def is_at_jump(frame: FrameType) -> bool:
    """Whether a handler that interrupted `frame` should let one instruction pass."""
    # A debugger's trace function would be replaced, and lost.
    return frame.f_code.co_code[frame.f_lasti] in _jumps and sys.gettrace() is None


def after_jump(frame: FrameType, act: Callable[[], None]) -> None:
    """Have `act` called before the next instruction of `frame`; it may raise into it."""

    def on_event(_frame: FrameType, _event: str, _arg: Any) -> None:
        sys.settrace(None)
        frame.f_trace = None
        frame.f_trace_opcodes = False
        act()

    frame.f_trace_opcodes = True
    frame.f_trace = on_event
    sys.settrace(lambda *_: None)
