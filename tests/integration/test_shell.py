"""`celery capsule shell`: a named session at a real terminal and in a pipe, and a host for it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from uuid import uuid4

import pytest

from tests.integration.hosting import HostWorker
from tests.sessions import HANG_S
from tests.terminals import CTRL_C, CTRL_D, ROOT, Terminal


@pytest.fixture
def host(valkey_url: str, prefix: str) -> Iterator[HostWorker]:
    """A host on a thread of its own: the tests block."""
    ready, stop = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()
    hosts: list[HostWorker] = []

    async def serve() -> None:
        async with HostWorker(valkey_url, prefix, {}) as host:
            hosts.append(host)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert ready.wait(HANG_S)
        yield hosts[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(HANG_S)
        loop.close()


@pytest.fixture
def session_id() -> str:
    return f"user-{uuid4().hex[:8]}"


@pytest.fixture
def command(valkey_url: str, prefix: str) -> Callable[..., list[str]]:
    """A command line for the app of these tests."""

    def made(*words: str) -> list[str]:
        settings = (f"TEST_REDIS_URL={valkey_url}", f"TEST_PREFIX={prefix}")
        celery = (sys.executable, "-m", "celery", "-A", "tests.integration.shell_app", "capsule")
        return ["/usr/bin/env", *settings, *celery, *words]

    return made


Command = Callable[..., list[str]]


@pytest.fixture
def terminal(host: HostWorker, command: Command, session_id: str) -> Iterator[Terminal]:
    """A shell at its first prompt."""
    with Terminal(command("shell", session_id)) as terminal:
        terminal.shows(f"session {session_id}, which is new: profile sandbox.")
        terminal.run("import os, sys, time")
        yield terminal


def piped(command: list[str], source: str, term: str = "xterm") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/usr/bin/env", f"TERM={term}", *command],
        input=source,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        cwd=ROOT,
        check=False,
    )


def test_values_output_and_errors_are_shown(terminal: Terminal) -> None:
    assert terminal.run("6 * 7") == ["42"]
    assert terminal.run("None") == []
    assert terminal.run("print('out')") == ["out"]
    assert terminal.run("1 / 0")[-1] == "ZeroDivisionError: division by zero"


def test_blocks_of_several_lines_are_edited_and_recalled(terminal: Terminal) -> None:
    terminal.type("for i in range(2):\r    print('a', i)\r\r")
    terminal.shows("a 1")
    terminal.at_prompt()
    terminal.type("\x1b[A\x1b[A\x1b[F\x7f + 5)\r")  # up, up, end, and over the last character
    terminal.shows("a 6")


def test_output_is_live_and_input_is_asked_for(terminal: Terminal) -> None:
    terminal.type("print('begin', 1 + 1); n = input('na' + 'me? '); print('hello', n)\r")
    terminal.shows("begin 2")
    terminal.shows(r"name\?")
    terminal.type("Ada\r")
    terminal.shows("hello Ada")


def test_a_password_is_not_shown(terminal: Terminal) -> None:
    terminal.run("from getpass import getpass")
    terminal.type("len(getpass('ke' + 'y? '))\r")
    terminal.shows(r"key\?.*")
    terminal.type("sesame\r")
    terminal.shows("6")
    assert "sesame" not in terminal.transcript


def test_ctrl_c_cancels_what_runs_and_keeps_the_names(terminal: Terminal) -> None:
    terminal.run("kept = 41")
    terminal.type("print('at', 'work'); time.sleep(3600)\r")
    terminal.shows("at work")
    terminal.type(CTRL_C)
    terminal.shows("# cancelled")
    assert terminal.run("kept + 1") == ["42"]


def test_commands_tell_about_the_session(terminal: Terminal, session_id: str) -> None:
    assert f"session     {session_id}" in terminal.run(":info")
    assert ":restart" in " ".join(terminal.run(":help"))
    assert terminal.run(":interrupt") == ["nothing is running"]
    terminal.type("print('at', 'work'); time.sleep(3600)\r")
    terminal.shows("at work")
    terminal.type(":stack\r")
    terminal.shows(
        '.*File "<.*',
    )
    terminal.type(":interrupt\r")
    terminal.shows("KeyboardInterrupt.*")


def test_the_session_lives_on_when_the_prompt_is_left(
    terminal: Terminal, command: Command, session_id: str
) -> None:
    terminal.run("kept = 41")
    terminal.type(CTRL_D)
    assert terminal.leave() == 0
    ended = piped(command("shell", session_id), "kept + 1\n")
    assert (ended.stdout, ended.stderr, ended.returncode) == ("42\n", "", 0)


def test_a_pipe_is_run_block_by_block(host: HostWorker, command: Command, session_id: str) -> None:
    source = "x = 20\nprint('out')\nif x:\n    y = x + 1\n\ny\n1 / 0\n"
    ended = piped(command("shell", session_id), source)
    assert (ended.stdout, ended.returncode) == ("out\n21\n", 1)
    assert ended.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_a_dumb_terminal_is_enough(host: HostWorker, command: Command, session_id: str) -> None:
    with Terminal(command("shell", session_id), term="dumb") as terminal:
        terminal.until(">>> ")
        terminal.type("print('n' + 'o', 'frills')\n")
        terminal.until("no frills\n")


def test_a_call_that_no_worker_takes_is_noted_and_cancelled(
    command: Command, session_id: str
) -> None:
    with Terminal(command("shell", session_id)) as terminal:
        terminal.shows(".*which is new.*")
        terminal.at_prompt()
        terminal.type("1\r")
        terminal.shows("# the call waits: no worker has the session yet; Ctrl-C cancels it")
        terminal.type(CTRL_C)
        terminal.shows("# cancelled")
        terminal.at_prompt()


def test_a_session_of_another_profile_is_refused(command: Command, session_id: str) -> None:
    with Terminal(command("shell", session_id)) as terminal:
        terminal.at_prompt()
        terminal.type("1\r")
        terminal.shows("# the call waits: .*")
        ended = piped(command("shell", session_id, "--profile", "other"), "1\n")
    assert ended.returncode == 1
    assert "has the profile 'sandbox', not 'other'" in ended.stderr
