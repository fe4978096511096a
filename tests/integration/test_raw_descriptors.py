"""Bytes that reach descriptors 1 and 2 past `sys.stdout`: they arrive and never touch a frame."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import pytest

from capsule_tasks.protocol.messages import ErrorKind, InputRequest, Output
from capsule_tasks.sessions import Session, SessionState
from tests.sessions import HANG_S, Watched, collect, end_of, eventually, text, until_exited

HALF_MB = 512 * 1024


async def test_os_system_writes_into_the_output_not_into_the_protocol(session: Session) -> None:
    done = await session.run("import os\nos.system('echo hi')")
    assert (done.stdout, done.value) == ("hi\n", 0)
    assert (await session.run("1 + 1")).value == 2


async def test_a_subprocess_writes_to_both_streams(session: Session) -> None:
    done = await session.run(
        "import subprocess\n"
        "subprocess.run(['sh', '-c', 'echo out; echo err >&2'], check=True).returncode"
    )
    assert (done.stdout, done.stderr, done.value) == ("out\n", "err\n", 0)


async def test_os_write_and_c_code_arrive(session: Session) -> None:
    done = await session.run(
        "import ctypes, os\n"
        "os.write(1, b'python ')\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.dprintf(1, b'and C')\n"
        "os.write(2, b'err')\n"
        "None"
    )
    assert (done.stdout, done.stderr) == ("python and C", "err")


async def test_frames_forged_on_the_standard_descriptors_are_only_text(session: Session) -> None:
    done = await session.run(
        "import os\n"
        "from capsule_tasks.protocol.codec import encode_frame\n"
        "from capsule_tasks.protocol.messages import Result\n"
        "frame = bytes(encode_frame(Result(execution_id='x', value='forged'), 1 << 20))\n"
        "for descriptor in (0, 1, 2):\n"
        "    try: os.write(descriptor, frame)\n"
        "    except OSError: pass\n"
        "'honest'"
    )
    assert done.value == "honest"
    assert "forged" in done.stdout


async def test_the_terminal_message_counts_raw_bytes_too(session: Session) -> None:
    result = await end_of(session, "import os\nprint('é')\nos.write(1, 'é'.encode()); None")
    assert result.stdout_bytes == 5


@pytest.mark.parametrize("number", [1, 2], ids=["stdout", "stderr"])
async def test_half_a_megabyte_from_a_subprocess_arrives_whole(
    session: Session, number: int
) -> None:
    messages = await collect(
        session,
        "import subprocess, sys\n"
        f"code = 'import os\\nfor _ in range(64): os.write({number}, b\"x\" * {HALF_MB // 64})'\n"
        "subprocess.run([sys.executable, '-c', code], check=True).returncode",
    )
    assert messages[-1].value == 0
    assert text(messages, ("stdout", "stderr")[number - 1]) == "x" * HALF_MB


async def test_stderr_is_drained_while_nothing_runs(session: Session) -> None:
    """A chatty daemon must not fill the pipe and hang, long after its execution ended."""
    done = await session.run(
        "import subprocess, sys\n"
        "code = 'import sys\\nfor _ in range(4000): sys.stderr.write(\"x\" * 100)'\n"
        "subprocess.Popen([sys.executable, '-c', code]).pid"
    )
    await until_exited(done.value)


async def test_bytes_that_no_execution_owns_go_to_the_session_and_its_log(
    session: Session, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "capsule_tasks.sessions")
    fifo = tmp_path / "go"
    os.mkfifo(fifo)
    await session.run(
        f"import subprocess\nsubprocess.Popen('read go < {fifo}; echo orphan', shell=True)"
    )
    await asyncio.to_thread(fifo.write_text, "go\n")
    message = await session.receive_message(timeout_s=HANG_S)
    assert (message.execution_id, message.data) == (None, "orphan\n")
    assert "orphan" in caplog.text


async def test_raw_bytes_of_two_running_coroutines_belong_to_neither(session: Session) -> None:
    source = "import asyncio, os\ngo = asyncio.Event()\nprint('there')\nawait go.wait()"
    first = Watched(session, source)
    await first.until_output("there")
    second = Watched(session, "print('there')\nos.write(1, b'whose?')\nawait go.wait()")
    await second.until_output("there")
    message = await session.receive_message(timeout_s=HANG_S)
    assert (message.execution_id, message.data) == (None, "whose?")
    for watched in (first, second):
        await session.cancel(watched.execution_id)
        await watched.ended()
        assert text(watched.messages) == "there\n"


async def test_characters_split_between_reads_are_put_together(session: Session) -> None:
    watched = Watched(
        session,
        "import os, time\n"
        "os.write(1, b'<\\xf0\\x9f')\n"
        "input()\n"
        "os.write(1, b'\\x98\\x80>')\n"
        "time.sleep(3600)",
    )
    question = await watched.until(InputRequest)
    await watched.until_output("<")
    await session.input_response("go on", request_id=question.id, execution_id=watched.execution_id)
    await watched.until_output("<😀>")
    await session.cancel(watched.execution_id)
    await watched.ended()


async def test_bytes_that_are_not_utf8_are_replaced(session: Session) -> None:
    done = await session.run("import os\nos.write(1, b'a\\xff\\xfeb'); None")
    assert done.stdout == "a��b"


@pytest.mark.parametrize("end", ["os._exit(3)", "os.kill(os.getpid(), 9)"])
async def test_the_last_bytes_of_a_dead_child_are_kept(end: str) -> None:
    for _ in range(10):
        async with Session() as session:
            messages = await collect(
                session,
                "import os, sys\n"
                "sys.stdout.write('text '); sys.stdout.flush()\n"
                "os.write(2, b'last words')\n"
                "os.write(1, b'raw' + b'.' * 60_000 + b'\\xc3')\n" + end,
            )
        assert messages[-1].kind == ErrorKind.LOST
        assert "text " in text(messages)
        assert "raw" + "." * 60_000 + "�" in text(messages)
        assert text(messages, "stderr") == "last words"


async def test_the_torn_last_character_is_kept_while_a_descendant_holds_the_pipe() -> None:
    async with Session() as session:
        messages = await collect(
            session,
            "import os, subprocess\n"
            "subprocess.Popen(['sleep', '3600'])\n"
            "os.write(1, b'torn \\xc3')\n"
            "os._exit(3)",
        )
    assert text(messages) == "torn �"


async def test_a_background_process_does_not_hold_up_the_end(session: Session) -> None:
    done = await session.run("import subprocess\nsubprocess.Popen(['sleep', '3600']).pid > 0")
    assert done.value is True
    assert session.state is SessionState.READY


async def test_code_that_closes_its_descriptors_still_prints_and_ends(session: Session) -> None:
    done = await session.run("import os\nos.close(1); os.close(2)\nprint('still here')")
    assert done.stdout == "still here\n"
    assert (await session.run("2")).value == 2


async def test_code_that_redirects_descriptor_1_to_a_file_is_obeyed(session: Session) -> None:
    done = await session.run(
        "import os, tempfile\n"
        "file = tempfile.TemporaryFile()\n"
        "os.dup2(file.fileno(), 1)\n"
        "os.system('echo to the file')\n"
        "print('to the watcher')\n"
        "file.seek(0); file.read()"
    )
    assert done.value == b"to the file\n"
    assert done.stdout == "to the watcher\n"


async def test_raw_bytes_belong_to_the_execution_that_wrote_them(session: Session) -> None:
    """Thirty executions in a row, each writing as its first and as its last act."""
    for i in range(30):
        messages = await collect(session, f"import os; os.write(1, b'{i};'); os.write(1, b'{i}.')")
        assert text(messages) == f"{i};{i}."


async def test_a_paused_consumer_stops_a_subprocess_by_backpressure(session: Session) -> None:
    """The pipe, the window and one chunk hold less than a tenth of what is written."""
    stream = session.execute(
        "import subprocess\n"
        "subprocess.run('yes | head -c 50000000', shell=True, check=True).returncode"
    )
    await anext(stream)
    first = await anext(stream)
    assert isinstance(first, Output)
    await eventually(lambda: session.info.queues.buffered_bytes >= 1024 * 1024)
    assert session.info.queues.buffered_bytes < 2 * 1024 * 1024
    received = len(first.data)
    async for message in stream:
        if isinstance(message, Output):
            received += len(message.data)
            assert session.info.queues.buffered_bytes < 2 * 1024 * 1024
    assert received == 50_000_000
    assert message.value == 0
