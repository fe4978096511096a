"""The result of an execution: its value if that can be sent, otherwise a marked repr."""

from __future__ import annotations

import datetime as dt
import decimal
import uuid
from typing import Any

import pytest

from capsule_tasks.errors import ExecutionFailed
from capsule_tasks.protocol.messages import Ack, ErrorKind, Output, Result
from capsule_tasks.sessions import Session, SessionState
from tests.sessions import Watched, child_config, collect, end_of

FRAME = 512 * 1024

VALUES: dict[str, Any] = {
    "None": None,
    "True": True,
    "-1.5e300": -1.5e300,
    "2**64 - 1": 2**64 - 1,
    "10**50": 10**50,
    "-2**200": -(2**200),
    "3 + 4j": 3 + 4j,
    "'text ü 😀'": "text ü 😀",
    r"'\ud800'": "\ud800",
    r"b'\x00\xff'": b"\x00\xff",
    "bytearray(b'ab')": bytearray(b"ab"),
    "(1, ('a', None))": (1, ("a", None)),
    "[]": [],
    "{1, 2}": {1, 2},
    "frozenset({'x'})": frozenset({"x"}),
    "{'a': [1], 2: (3,), (4, 5): {6}, None: b''}": {"a": [1], 2: (3,), (4, 5): {6}, None: b""},
    "range(1, 9, 2)": range(1, 9, 2),
    "datetime.datetime(2024, 2, 29, 12, 30, 15, 123456)": dt.datetime(  # noqa: DTZ001
        2024, 2, 29, 12, 30, 15, 123456
    ),
    "datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone.utc)": dt.datetime(
        2024, 1, 1, tzinfo=dt.UTC
    ),
    "datetime.date(2024, 2, 29)": dt.date(2024, 2, 29),
    "datetime.time(1, 2, 3)": dt.time(1, 2, 3),
    "datetime.timedelta(days=-1, microseconds=1)": dt.timedelta(days=-1, microseconds=1),
    "decimal.Decimal('1.10')": decimal.Decimal("1.10"),
    "uuid.UUID(int=5)": uuid.UUID(int=5),
}


@pytest.mark.parametrize("source", VALUES)
async def test_a_value_arrives_with_its_type(session: Session, source: str) -> None:
    result = await end_of(session, f"import datetime, decimal, uuid\n{source}")
    assert isinstance(result, Result)
    assert not result.is_repr
    assert result.value == VALUES[source]
    assert type(result.value) is type(VALUES[source])
    assert result.type_name.rpartition(".")[2] == type(VALUES[source]).__name__


@pytest.mark.parametrize(
    ("source", "value", "type_name"),
    [
        ("np.int64(7)", 7, "numpy.int64"),
        ("np.float32(0.5)", 0.5, "numpy.float32"),
        ("np.bool_(True)", True, "numpy.bool"),
        ("np.str_('s')", "s", "numpy.str_"),
        ("[np.uint8(255), (np.float64(1.5),)]", [255, (1.5,)], "list"),
        ("np.datetime64('2024-02-29')", dt.date(2024, 2, 29), "numpy.datetime64"),
    ],
)
async def test_numpy_scalars_keep_their_value(
    session: Session, source: str, value: object, type_name: str
) -> None:
    result = await end_of(session, f"import numpy as np\n{source}")
    assert not result.is_repr
    assert result.value == value
    assert type(result.value) is type(value)
    assert result.type_name == type_name


@pytest.mark.parametrize(
    ("source", "type_name", "shown"),
    [
        ("object()", "object", "<object object at"),
        ("class Point: pass\nPoint()", "Point", "<__main__.Point object at"),
        ("lambda: 0", "function", "<function <lambda> at"),
        ("import sys; sys", "module", "<module 'sys'"),
        ("type('Odd', (int,), {})(5)", "Odd", "5"),
        ("import collections; collections.OrderedDict(a=1)", "collections.OrderedDict", "Ordered"),
        ("l = []; l.append(l); l", "list", "[[...]]"),
        ("[1, object()]", "list", "[1, <object object at"),
        ("import numpy as np; np.array([1, 2])", "numpy.ndarray", "array([1, 2])"),
        ("np.datetime64(1, 'ns')", "numpy.datetime64", "np.datetime64('1970-"),
    ],
)
async def test_a_value_that_cannot_be_sent_arrives_as_its_marked_repr(
    session: Session, source: str, type_name: str, shown: str
) -> None:
    result = await end_of(session, f"import numpy as np\n{source}")
    assert isinstance(result, Result)
    assert result.is_repr
    assert result.type_name == type_name
    assert result.value.startswith(shown)


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        ("raise ValueError('no')", "<Odd whose repr raised ValueError>"),
        ("return 5", "<Odd whose repr raised TypeError>"),
        ("return '\\ud800 é'", "\\ud800 é"),
        ("return type('Sub', (str,), {'isascii': lambda s: True})('é\\ud800')", "é\\ud800"),
    ],
    ids=["raises", "returns no text", "lone surrogate", "subclass of str"],
)
async def test_an_odd_repr_is_no_danger(session: Session, body: str, shown: str) -> None:
    result = await end_of(session, f"class Odd:\n    def __repr__(self): {body}\nOdd()")
    assert isinstance(result, Result)
    assert result.value == shown
    assert (await session.run("1")).value == 1


async def test_a_repr_that_exits_is_that_executions_error(session: Session) -> None:
    error = await end_of(session, "class Odd:\n    def __repr__(self): raise SystemExit(3)\nOdd()")
    assert (error.kind, error.type) == (ErrorKind.RAISED, "SystemExit")
    assert "capsule_tasks" not in error.traceback
    assert (await session.run("1")).value == 1


async def test_a_type_with_an_unspeakable_name_is_no_danger(session: Session) -> None:
    result = await end_of(
        session,
        "class Odd: pass\nOdd.__qualname__ = '\\ud800' + 'x' * 10_000\nOdd.__module__ = '\\udfff'\n"
        "Odd()",
    )
    assert result.type_name.startswith("\\udfff.\\ud800xxx")
    assert len(result.type_name) < 2000


async def test_a_slow_repr_holds_up_neither_control_nor_a_cancel(session: Session) -> None:
    watched = Watched(
        session,
        "import time\n"
        "class Slow:\n"
        "    def __repr__(self):\n"
        "        print('thinking', flush=True)\n"
        "        time.sleep(3600)\n"
        "Slow()",
    )
    await watched.until_output("thinking")
    summary = await session.namespace_summary(timeout_s=30)
    assert "Slow" in [entry.name for entry in summary.entries]
    assert await session.cancel(watched.execution_id, grace_s=30) == "interrupted"
    assert (await watched.ended()).kind == ErrorKind.CANCELLED


@pytest.mark.parametrize(
    "source",
    [
        f"'x' * {FRAME}",
        f"[b'y' * {FRAME // 2}] * 3",
        f"type('Big', (), {{'__repr__': lambda self: 'z' * {FRAME}}})()",
    ],
    ids=["text", "nested bytes", "repr"],
)
async def test_a_result_over_the_frame_ceiling_is_an_error_for_that_execution_alone(
    source: str,
) -> None:
    async with Session(child_config(max_frame_bytes=FRAME)) as session:
        pid = session.info.pid
        messages = await collect(session, f"print('kept')\n{source}")
        ack, *outputs, error = messages  # the line and its end may come one after the other
        assert isinstance(ack, Ack)
        assert "".join(each.data for each in outputs) == "kept\n"
        assert error.kind == ErrorKind.TOO_LARGE
        assert error.stdout_bytes == 5
        assert str(FRAME) in error.message
        assert (await session.run("len(_) > 0 if isinstance(_, (str, list)) else True")).value
        assert (session.state, session.info.pid) == (SessionState.READY, pid)


async def test_a_source_over_the_frame_ceiling_is_an_error_for_that_execution_alone() -> None:
    async with Session(child_config(max_frame_bytes=FRAME)) as session:
        (error,) = await collect(session, f"x = '{'x' * FRAME}'")
        assert error.kind == ErrorKind.TOO_LARGE
        assert str(FRAME) in error.message
        assert session.state is SessionState.READY
        with pytest.raises(ExecutionFailed, match="ceiling"):
            await session.run(f"x = '{'x' * FRAME}'")
        assert (await session.run("1")).value == 1


async def test_a_source_that_utf8_cannot_encode_is_an_error_for_that_execution_alone(
    session: Session,
) -> None:
    (error,) = await collect(session, "print('\ud800')")
    assert (error.kind, error.type) == (ErrorKind.RAISED, "UnicodeEncodeError")
    assert session.state is SessionState.READY
    assert (await session.run("1")).value == 1


@pytest.mark.parametrize("wrong", [b"text", 1, None])
async def test_a_source_that_is_no_text_is_the_callers_error(
    session: Session, wrong: object
) -> None:
    with pytest.raises(TypeError, match="source must be str"):
        await collect(session, wrong)  # type: ignore[arg-type]
    assert session.state is SessionState.READY


async def test_an_id_that_is_no_text_is_the_callers_error(session: Session) -> None:
    with pytest.raises(TypeError, match="execution_id must be str"):
        await collect(session, "1", execution_id=5)
    assert (await session.run("1")).value == 1


async def test_a_large_value_within_the_ceiling_arrives(session: Session) -> None:
    assert (await session.run("b'x' * 30_000_000")).value == b"x" * 30_000_000


async def test_an_ack_comes_first_and_closes_nothing(session: Session) -> None:
    ack, output, result = await collect(session, "print(1)\n2", execution_id="mine")
    assert isinstance(ack, Ack)
    assert isinstance(output, Output)
    assert {m.execution_id for m in (ack, output, result)} == {"mine"}
    assert ack.accepted_at <= output.timestamp
    assert len({ack.id, output.id, result.id}) == 3


async def test_the_ack_does_not_wait_for_the_code(session: Session) -> None:
    watched = Watched(session, "import time; time.sleep(3600)")
    ack = await watched.until(Ack)
    assert ack.execution_id == watched.execution_id
    await session.cancel(watched.execution_id)
    await watched.ended()


async def test_run_returns_the_value_and_raises_the_error(session: Session) -> None:
    done = await session.run("print('on the way')\n6 * 7")
    assert (done.value, done.stdout, done.stderr) == (42, "on the way\n", "")
    with pytest.raises(ExecutionFailed, match="ZeroDivisionError") as failed:
        await session.run("1 / 0")
    assert failed.value.error.type == "ZeroDivisionError"
    assert "line 1" in failed.value.__notes__[0]
