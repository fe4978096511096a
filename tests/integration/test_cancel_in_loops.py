"""A cancel that meets a loop at its jump back, where CPython misplaces what a handler raises."""

from __future__ import annotations

import pytest

from capsule_tasks.protocol.messages import Error, ErrorKind
from capsule_tasks.sessions import Session
from tests.sessions import Watched, text

LOOPS = {
    "forever on one line": "while True: pass",
    "forever over lines": "while True:\n        x = 1",
    "forever with a call": "while True: len([])",
    "with a condition": "while busy: pass",
    "with a comparison": "while busy is not None: busy = 1",
    "with a call as its condition": "while len([1]): pass",
    "with continue": "while True:\n        if busy: continue",
    "over an iterator": "for _ in iter(int, 1): pass",
    "inside an expression": "[1 for _ in iter(int, 1)]",
}


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS.keys())
async def test_the_try_around_a_loop_sees_the_cancel(session: Session, loop: str) -> None:
    source = (
        "busy = 1\n"
        f"try:\n    print('at work')\n    {loop}\n"
        "except BaseException as error:\n    print(type(error).__name__)\n    raise\n"
        "finally:\n    print('finally ran')"
    )
    watched = Watched(session, source)
    await watched.until_output("at work\n")
    assert await session.cancel(watched.execution_id, grace_s=20) == "interrupted"
    terminal = await watched.ended()
    assert isinstance(terminal, Error)
    assert terminal.kind == ErrorKind.CANCELLED
    assert text(watched.messages) == "at work\nExecutionCancelled\nfinally ran\n"
    assert "capsule_tasks/child" not in terminal.traceback


async def test_a_trace_function_of_the_code_itself_is_kept(session: Session) -> None:
    source = (
        "import sys\nsys.settrace(lambda *_: None)\nprint('at work')\n"
        "try:\n    while True: pass\nfinally:\n    kept = sys.gettrace() is not None"
    )
    watched = Watched(session, source)
    await watched.until_output("at work\n")
    await session.cancel(watched.execution_id, grace_s=20)
    await watched.ended()
    assert (await session.run("sys.gettrace() is not None")).value is True
    assert (await session.run("sys.settrace(None)")).value is None


async def test_no_trace_function_is_left_behind(session: Session) -> None:
    watched = Watched(session, "print('at work')\nwhile True: pass")
    await watched.until_output("at work\n")
    await session.cancel(watched.execution_id, grace_s=20)
    await watched.ended()
    assert (await session.run("import sys; sys.gettrace()")).value is None
