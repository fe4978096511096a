"""Output on `sys.stdout` and `sys.stderr` arrives completely, in order, soon, and once."""

from __future__ import annotations

import logging

import pytest

from capsule_tasks.protocol.messages import Output, Result
from capsule_tasks.sessions import Session
from capsule_tasks.settings import OutputSettings
from tests.sessions import Watched, child_config, collect, end_of, eventually, text

TWO_MB = 2 * 1024 * 1024


async def test_stdout_and_stderr_arrive_apart(session: Session) -> None:
    done = await session.run("import sys\nprint('out')\nprint('err', file=sys.stderr)")
    assert (done.stdout, done.stderr) == ("out\n", "err\n")


async def test_the_order_of_stdout_and_stderr_is_kept(session: Session) -> None:
    messages = await collect(
        session,
        "import sys\nfor i in range(100):\n    print(i, file=(sys.stdout, sys.stderr)[i % 2])",
    )
    written = "".join(m.data for m in messages if isinstance(m, Output))
    assert written.split() == [str(i) for i in range(100)]


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
async def test_a_partial_line_is_seen_while_the_code_runs(session: Session, stream: str) -> None:
    watched = Watched(
        session, f"import sys, time\nsys.{stream}.write('no newline')\ntime.sleep(3600)"
    )
    await watched.until_output("no newline")
    await session.cancel(watched.execution_id)
    await watched.ended()
    assert text(watched.messages, stream) == "no newline"


async def test_later_text_is_seen_while_the_code_runs_without_a_flush(session: Session) -> None:
    watched = Watched(
        session,
        "import time\n"
        "for word in ('first', 'second', 'third'):\n"
        "    print(word, end=' ')\n"
        "time.sleep(3600)",
    )
    await watched.until_output("first second third ")
    await session.cancel(watched.execution_id)
    await watched.ended()


async def test_flush_sends_the_written_text_at_once(session: Session) -> None:
    """Behind the flush the interpreter is held, so no other thread of the child can send it."""
    watched = Watched(
        session,
        "import ctypes\nprint('a', end='')\nprint('b', flush=True)\nctypes.PyDLL(None).sleep(3600)",
    )
    await watched.until_output("ab")
    await session.cancel(watched.execution_id, grace_s=0)
    await watched.ended()


async def test_progress_bars_with_carriage_returns_arrive_step_by_step(session: Session) -> None:
    watched = Watched(
        session,
        "import time\n"
        "for percent in (0, 50, 100):\n"
        "    print(f'\\r{percent:3}%', end='', flush=True)\n"
        "time.sleep(3600)",
    )
    await watched.until_output("100%")
    await session.cancel(watched.execution_id)
    await watched.ended()
    assert text(watched.messages) == "\r  0%\r 50%\r100%"


@pytest.mark.parametrize(
    "written",
    [
        "one\ntwo\r\nthree\rfour\n\r\n\n",
        "ümlaut – 漢字 – 😀 – a\u0301 – \u202eright to left\n",
        "nul \0 bell \a escape \x1b[31mred\x1b[0m\n",
        "\u2028\x85\x0b\x0c",
    ],
    ids=["line endings", "unicode", "control characters", "other line separators"],
)
async def test_text_arrives_as_it_was_written(session: Session, written: str) -> None:
    done = await session.run(f"import sys\nsys.stdout.write({written!r})")
    assert done.stdout == written
    assert done.value == len(written)


async def test_lone_surrogates_are_spelled_out_and_output_goes_on(session: Session) -> None:
    done = await session.run(r"print('a\ud800b'); print('\udfff' * 3); print('fine')")
    assert done.stdout == "a\\ud800b\n\\udfff\\udfff\\udfff\nfine\n"


@pytest.mark.parametrize("character", ["x", "é", "😀"])
async def test_a_line_of_two_megabytes_arrives_whole(session: Session, character: str) -> None:
    done = await session.run(f"print({character!r} * {TWO_MB // len(character.encode())})")
    assert done.stdout == character * (TWO_MB // len(character.encode())) + "\n"
    assert done.result.stdout_bytes == TWO_MB + 1


async def test_a_hundred_thousand_lines_arrive_in_order_in_few_messages(session: Session) -> None:
    messages = await collect(session, "for i in range(100_000): print(i)")
    assert text(messages) == "".join(f"{i}\n" for i in range(100_000))
    assert len(messages) < 2000


async def test_no_message_is_larger_than_a_chunk() -> None:
    config = child_config(output=OutputSettings(chunk_bytes=1000))
    async with Session(config) as session:
        messages = await collect(session, "print('x' * 50_000)")
    assert text(messages) == "x" * 50_000 + "\n"
    assert max(len(m.data) for m in messages if isinstance(m, Output)) <= 1000


async def test_the_terminal_message_counts_the_bytes_of_each_stream(session: Session) -> None:
    result = await end_of(
        session, "import sys\nprint('é' * 3)\nprint('abc', file=sys.stderr, end='')"
    )
    assert (result.stdout_bytes, result.stderr_bytes) == (7, 3)


async def test_the_count_of_bytes_is_that_of_the_text_that_arrived(session: Session) -> None:
    messages = await collect(session, r"print('\ud800'); print('é' * 200_000); import os")
    assert messages[-1].stdout_bytes == len(text(messages).encode())


async def test_all_output_comes_before_the_result(session: Session) -> None:
    for _ in range(50):
        messages = await collect(session, "print('x' * 300_000, end='')\n'end'")
        assert isinstance(messages[-1], Result)
        assert len(text(messages)) == 300_000


async def test_writing_nothing_sends_nothing(session: Session) -> None:
    messages = await collect(session, "import sys\nsys.stdout.write('')\nprint(end='')\n")
    assert not [m for m in messages if isinstance(m, Output)]


async def test_a_program_that_sets_up_its_streams_goes_on(session: Session) -> None:
    source = (
        "import sys\n"
        "for stream in (sys.stdin, sys.stdout, sys.stderr):\n"
        "    stream.reconfigure(encoding='utf-8', errors='replace')\n"
        "sys.stdout.reconfigure(line_buffering=True)\n"
        "print('é')"
    )
    assert text(await collect(session, source)) == "é\n"


async def test_bytes_written_to_the_buffer_are_decoded_also_when_a_character_is_split(
    session: Session,
) -> None:
    done = await session.run(
        "import sys\n"
        "for byte in 'é漢😀'.encode():\n"
        "    sys.stdout.buffer.write(bytes([byte]))\n"
        "sys.stdout.buffer.write(b'\\xff!')\n"
        "sys.stdout.buffer.flush()"
    )
    assert done.stdout == "é漢😀\\xff!"


async def test_logging_and_warnings_reach_stderr(session: Session) -> None:
    done = await session.run(
        "import logging, warnings\n"
        "logging.basicConfig(format='%(levelname)s %(message)s')\n"
        "logging.error('logged')\n"
        "warnings.warn('warned')"
    )
    assert "ERROR logged\n" in done.stderr
    assert "UserWarning: warned" in done.stderr
    assert done.stdout == ""


async def test_a_log_handler_made_in_one_execution_writes_to_the_next(session: Session) -> None:
    await session.run("import logging\nlogging.basicConfig(format='%(message)s')")
    done = await session.run("logging.warning('again')")
    assert done.stderr == "again\n"


async def test_writing_anything_but_text_is_the_writers_error(session: Session) -> None:
    error = await end_of(session, "import sys\nsys.stdout.write(b'bytes')")
    assert error.type == "TypeError"
    assert "must be str, not bytes" in error.message


async def test_a_subclass_of_str_is_written_as_its_text(session: Session) -> None:
    done = await session.run(
        "class Shout(str):\n"
        "    def __str__(self): return 'not asked'\n"
        "    def __len__(self): return 1000\n"
        "import sys\n"
        "sys.stdout.write(Shout('quiet'))\n"
        "None"
    )
    assert done.stdout == "quiet"


async def test_closing_or_replacing_the_streams_harms_no_later_execution(session: Session) -> None:
    await session.run("import sys\nsys.stdout.close(); sys.stderr.close()")
    done = await session.run(
        "import contextlib, io\n"
        "with contextlib.redirect_stdout(io.StringIO()) as kept: print('caught')\n"
        "print('seen', kept.getvalue(), end='')"
    )
    assert done.stdout == "seen caught\n"


async def test_the_streams_describe_themselves_truthfully(session: Session) -> None:
    done = await session.run(
        "import sys\n"
        "[(s.isatty(), s.writable(), s.encoding, s.fileno()) for s in (sys.stdout, sys.stderr)]"
    )
    assert done.value == [(False, True, "utf-8", 1), (False, True, "utf-8", 2)]


async def test_output_of_a_late_thread_goes_to_the_log_and_is_counted(
    session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "capsule_tasks.sessions")
    messages = await collect(
        session,
        "import threading\n"
        "go = threading.Event()\n"
        "late = threading.Thread(target=lambda: (go.wait(), print('too läte', end='')))\n"
        "late.start()",
        execution_id="early",
    )
    assert text(messages) == ""
    during = await session.run("go.set(); late.join(); print('mine')")
    assert during.stdout == "mine\n"
    await eventually(lambda: session.metrics["late_output_bytes"] == len("too läte".encode()))
    assert "after the end of early: too läte" in caplog.text
    message = await session.receive_message(timeout_s=30)
    assert (message.execution_id, message.data) == ("early", "too läte")


async def test_a_late_flood_neither_blocks_its_thread_nor_reaches_the_next_execution(
    session: Session,
) -> None:
    await session.run(
        "import threading\n"
        "go = threading.Event()\n"
        "def flood():\n"
        "    go.wait()\n"
        "    for _ in range(200): print('x' * 50_000)\n"
        "late = threading.Thread(target=flood)\n"
        "late.start()"
    )
    during = await session.run("go.set(); late.join(); print('mine')")
    assert during.stdout == "mine\n"
