"""How an execution fails: with its own error, shown as Python shows it, and the session lives."""

from __future__ import annotations

from typing import Any

import pytest

from capsule_tasks.protocol.messages import Error, ErrorKind
from capsule_tasks.sessions import Session, SessionState
from tests.sessions import collect, end_of


async def failed(session: Session, source: str, **options: Any) -> Error:
    """The error of an execution that raises, once it is certain that the session survived it."""
    error = await end_of(session, source, **options)
    assert isinstance(error, Error)
    assert error.kind == ErrorKind.RAISED
    assert "capsule_tasks" not in error.traceback
    assert session.state is SessionState.READY
    assert (await session.run("'alive'")).value == "alive"
    return error


async def test_an_exception_arrives_with_type_message_and_source_lines(session: Session) -> None:
    error = await failed(session, "def f(x):\n    return 1 / x\n\nf(0)")
    assert (error.type, error.message) == ("ZeroDivisionError", "division by zero")
    assert error.traceback.startswith("Traceback (most recent call last):\n")
    for part in ("line 4, in <module>", "    f(0)\n", "line 2, in f", "    return 1 / x\n"):
        assert part in error.traceback


async def test_the_namespace_is_kept_over_an_exception(session: Session) -> None:
    await failed(session, "x = 1\nraise ValueError\nx = 2")
    assert (await session.run("x")).value == 1


async def test_lines_of_functions_from_earlier_executions_are_quoted(session: Session) -> None:
    await session.run("def broken():\n    raise LookupError('from the first')\n")
    await session.run("other = 'lines\\nof\\nanother\\ncell'")
    error = await failed(session, "broken()")
    assert "raise LookupError('from the first')" in error.traceback
    assert error.traceback.count('File "<cell') == 2


async def test_types_are_named_with_their_module(session: Session) -> None:
    error = await failed(session, "import json; json.loads('{')")
    assert error.type == "json.decoder.JSONDecodeError"
    own = await failed(session, "class Own(Exception): pass\nraise Own('mine')")
    assert (own.type, own.message) == ("Own", "mine")


async def test_causes_and_contexts_are_shown_in_full(session: Session) -> None:
    error = await failed(
        session,
        "try:\n"
        "    try:\n"
        "        {}['key']\n"
        "    except KeyError as missing:\n"
        "        raise ValueError('second') from missing\n"
        "except ValueError:\n"
        "    raise RuntimeError('third')",
    )
    shown = error.traceback
    assert error.type == "RuntimeError"
    assert shown.index("KeyError: 'key'") < shown.index("direct cause of the following exception")
    assert shown.index("ValueError: second") < shown.index("During handling of the above exception")
    assert shown.rstrip().endswith("RuntimeError: third")
    assert "        {}['key']" not in shown
    assert "    {}['key']" in shown


async def test_a_suppressed_context_is_not_shown(session: Session) -> None:
    error = await failed(
        session, "try: 1 / 0\nexcept ZeroDivisionError: raise ValueError('alone') from None"
    )
    assert "division by zero" not in error.traceback


async def test_an_exception_group_is_shown_with_its_members(session: Session) -> None:
    error = await failed(
        session,
        "def member(): raise KeyError('inner')\n"
        "try: member()\n"
        "except KeyError as e: raise ExceptionGroup('several', [ValueError('one'), e])",
    )
    assert error.type == "ExceptionGroup"
    for part in ("several (2 sub-exceptions)", "ValueError: one", "KeyError: 'inner'", "in member"):
        assert part in error.traceback


async def test_notes_arrive_beside_the_traceback(session: Session) -> None:
    error = await failed(
        session,
        "e = ValueError('noted')\ne.add_note('first \\ud800')\ne.add_note('second')\nraise e",
    )
    assert error.notes == ("first \\ud800", "second")
    assert "noted\nfirst" in error.traceback


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise ValueError", "<str() of it raised ValueError>"),
        ("return 5", "<str() of it raised TypeError>"),
        ("return type('Sub', (str,), {'isascii': lambda s: True})('é\\ud800')", "é\\ud800"),
    ],
    ids=["raises", "returns no text", "returns a subclass of str"],
)
async def test_an_exception_whose_repr_fails(session: Session, body: str, message: str) -> None:
    error = await failed(
        session, f"class Odd(Exception):\n    def __str__(self): {body}\nraise Odd('real')"
    )
    assert (error.type, error.message) == ("Odd", message)
    assert "raise Odd('real')" in error.traceback


async def test_an_exception_that_exits_while_it_is_described(session: Session) -> None:
    error = await failed(
        session,
        "class Odd(Exception):\n    def __str__(self): raise SystemExit(3)\nraise Odd",
    )
    assert (error.type, error.message) == ("SystemExit", "raised while an error was described")


async def test_an_exception_with_an_unspeakable_name_is_no_danger(session: Session) -> None:
    error = await failed(
        session,
        "class Odd(Exception): pass\nOdd.__qualname__ = '\\ud800'\nOdd.__module__ = '\\udfff'\n"
        "raise Odd('\\udc80')",
    )
    assert (error.type, error.message) == ("\\udfff.\\ud800", "\\udc80")


async def test_a_huge_message_is_shortened_and_marked(session: Session) -> None:
    error = await failed(session, "raise ValueError('a' + 'x' * 50_000_000 + 'z')")
    assert error.message.startswith("ax")
    assert error.message.endswith("xz")
    assert "characters left out" in error.message
    assert len(error.message) + len(error.traceback) < 1_000_000


async def test_deep_recursion_is_that_executions_error(session: Session) -> None:
    error = await failed(session, "def f(): f()\nf()")
    assert error.type == "RecursionError"
    assert "Previous line repeated" in error.traceback


@pytest.mark.parametrize(
    ("source", "type_", "part"),
    [
        ("1 +", "SyntaxError", "    1 +"),
        ("def f():\n  x\n y", "IndentationError", 'File "<cell 1>", line 3'),
        ("for", "SyntaxError", "invalid syntax"),
        ("return 5", "SyntaxError", "'return' outside function"),
        ("x = 'a\0b'", "SyntaxError", "null bytes"),
        ("(" * 1000 + ")" * 1000, "SyntaxError", "too many nested parentheses"),
        ("-" * 200_000 + "1", "MemoryError|RecursionError", ""),
    ],
    ids=["unfinished", "indentation", "keyword", "return", "nul", "parentheses", "depth"],
)
async def test_a_source_that_does_not_compile(
    session: Session, source: str, type_: str, part: str
) -> None:
    error = await failed(session, source)
    assert error.type in type_.split("|")
    assert part in error.traceback


async def test_nothing_of_a_source_that_does_not_compile_is_run(session: Session) -> None:
    messages = await collect(session, "print('never')\nx = (")
    assert [type(m).__name__ for m in messages] == ["Ack", "Error"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import sys; sys.exit(3)", "3"),
        ("import sys; sys.exit('because')", "because"),
        ("quit()", "None"),
        ("exit(0)", "0"),
        ("raise SystemExit", ""),
        ("import asyncio\nawait asyncio.sleep(0)\nraise SystemExit(4)", "4"),
    ],
)
async def test_an_exit_is_that_executions_error_and_the_session_lives(
    session: Session, source: str, message: str
) -> None:
    pid = session.info.pid
    error = await failed(session, f"kept = 1\n{source}")
    assert (error.type, error.message) == ("SystemExit", message)
    assert (await session.run("kept")).value == 1
    assert session.info.pid == pid


@pytest.mark.parametrize("type_", ["KeyboardInterrupt", "GeneratorExit", "BaseException"])
@pytest.mark.parametrize("start", ["", "import asyncio\nawait asyncio.sleep(0)\n"])
async def test_any_base_exception_of_user_code_is_only_its_error(
    session: Session, start: str, type_: str
) -> None:
    error = await failed(session, f"{start}raise {type_}('by hand')")
    assert (error.type, error.message) == (type_, "by hand")


async def test_a_cancelled_error_that_user_code_raises_is_its_error(session: Session) -> None:
    error = await failed(session, "import asyncio\nraise asyncio.CancelledError('by hand')")
    assert error.type == "asyncio.exceptions.CancelledError"


async def test_an_exception_in_a_thread_is_logged_and_ends_nothing(session: Session) -> None:
    done = await session.run(
        "import threading\n"
        "thread = threading.Thread(target=lambda: 1 / 0, name='worker')\n"
        "thread.start(); thread.join()\n"
        "'went on'"
    )
    assert done.value == "went on"
    assert "Exception in thread worker" in done.stderr
    assert "ZeroDivisionError" in done.stderr


async def test_an_exit_in_a_thread_or_a_task_ends_nothing(session: Session) -> None:
    done = await session.run(
        "import threading, sys\n"
        "thread = threading.Thread(target=lambda: sys.exit(3))\n"
        "thread.start(); thread.join()\n"
        "'went on'"
    )
    assert done.value == "went on"
    done = await session.run(
        "import asyncio\n"
        "async def leave(): raise SystemExit(5)\n"
        "task = asyncio.ensure_future(leave())\n"
        "await asyncio.wait({task})\n"
        "type(task.exception()).__name__"
    )
    assert done.value == "SystemExit"


async def test_errors_are_counted_and_the_last_one_is_remembered(session: Session) -> None:
    await failed(session, "raise ValueError('last')")
    info = session.info
    assert (info.execution_count, info.error_count) == (2, 1)
    assert info.last_error == "ValueError: last"
