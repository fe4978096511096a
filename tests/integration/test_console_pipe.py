"""The interactive session as a filter: code comes through a pipe, results go into others."""

from __future__ import annotations

import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sessions import HANG_S
from tests.terminals import CONSOLE, ROOT


def console(source: str, *options: str) -> subprocess.CompletedProcess[str]:
    """A console that is given `source` and then the end of input."""
    return subprocess.run(
        [*CONSOLE, *options],
        input=source,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        cwd=ROOT,
        check=False,
    )


@pytest.fixture
def open_console() -> Iterator[subprocess.Popen[str]]:
    """A console whose input stays open."""
    pipe = subprocess.PIPE
    with subprocess.Popen(CONSOLE, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        yield process
        process.kill()


def say(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdin is not None
    process.stdin.write(text)
    process.stdin.flush()


def next_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def test_only_output_and_results_are_written_without_prompt_or_colour() -> None:
    ended = console("x = 20\nprint('out')\nimport sys; print('err', file=sys.stderr)\nx + 1\n")
    assert (ended.stdout, ended.stderr, ended.returncode) == ("out\n21\n", "err\n", 0)


@pytest.mark.parametrize(
    ("source", "status"),
    [
        ("", 0),
        ("1\n", 0),
        ("1 / 0\n", 1),
        ("1 / 0\n1\n", 0),
        ("raise SystemExit(0)\n", 1),
        ("x = (1,\n", 1),
        (":restore /nonexistent/file\n", 1),
        ("1 / 0\n:names\n", 0),
        ("1 / 0\n:quit\n1\n", 1),
    ],
)
def test_the_exit_status_tells_how_the_last_input_ended(source: str, status: int) -> None:
    assert console(source).returncode == status


def test_an_error_is_a_traceback_on_stderr_and_the_session_goes_on() -> None:
    ended = console("def broken():\n    raise ValueError('why')\n\nbroken()\n'on'\n")
    assert ended.stdout == "'on'\n"
    assert ended.stderr.startswith("Traceback (most recent call last):\n")
    assert "in broken\n    raise ValueError('why')\nValueError: why\n" in ended.stderr


def test_a_script_without_blank_lines_behind_its_blocks_runs() -> None:
    script = (
        "def f(n):\n    return n + 1\nfor n in (1, 2):\n    print(f(n))\nelse:\n    'x'\nf(3)\n"
    )
    assert console(script).stdout == "2\n3\n4\n"


def test_windows_line_ends_and_a_last_line_without_one_are_understood() -> None:
    ended = console("if True:\r\n    print(1)\r\n\r\nx = input()\r\nanswer\r\nx")
    assert ended.stdout == "1\n'answer'\n"


def test_input_reads_the_lines_that_follow_and_meets_the_end() -> None:
    ended = console("first = input('ask: ')\nanswer\nfirst\ninput()")
    assert ended.stdout == "ask: 'answer'\n"
    assert "EOFError" in ended.stderr


def test_a_result_that_did_not_travel_is_marked() -> None:
    assert console("import sys; sys\n").stdout == (
        "<module 'sys' (built-in)>  # repr only, of type module\n"
    )


def test_a_value_without_a_printable_repr_does_not_end_the_console() -> None:
    assert console("10 ** 5000\n'on'\n").stdout.endswith("'on'\n")


def test_text_that_has_no_utf8_is_spelled_out() -> None:
    assert console("print('\\ud800')\n").stdout == "\\ud800\n"


def test_progress_is_shown() -> None:
    ended = console("from capsule_tasks import progress\nprogress(1, 4, 'rows')\n")
    assert ended.stderr == "# 1 of 4 rows\n"


def test_output_written_during_exit_is_shown() -> None:
    assert console("import atexit; _ = atexit.register(print, 'bye')\n").stdout == "bye\n"


def test_output_and_results_come_while_input_is_open(open_console: subprocess.Popen[str]) -> None:
    say(open_console, "print('at once')\n")
    assert next_line(open_console) == "at once\n"
    say(open_console, "40 + 2\n")
    assert next_line(open_console) == "42\n"
    say(open_console, "print('before'); _ = input(); print('after')\n")
    assert next_line(open_console) == "before\n"
    say(open_console, "go\n")
    assert next_line(open_console) == "after\n"


def test_sigint_cancels_running_code_and_the_next_line_is_read(
    open_console: subprocess.Popen[str],
) -> None:
    say(open_console, "kept = 1\nimport time; print('at work'); time.sleep(3600)\n")
    assert next_line(open_console) == "at work\n"
    open_console.send_signal(signal.SIGINT)
    say(open_console, "kept\n")
    assert next_line(open_console) == "1\n"
    _, errors = open_console.communicate(timeout=HANG_S)
    assert "# interrupted after " in errors
    assert open_console.returncode == 0


def test_sigint_between_executions_ends_it(open_console: subprocess.Popen[str]) -> None:
    say(open_console, "import os; os.getpid()\n:interrupt\n")
    pid = int(next_line(open_console))
    assert next_line(open_console) == "nothing is running\n"
    open_console.send_signal(signal.SIGINT)
    assert open_console.wait(HANG_S) == 128 + signal.SIGINT
    assert not Path(f"/proc/{pid}").exists()


def test_sigint_works_even_if_it_was_ignored_at_the_start() -> None:
    pipe, shell = subprocess.PIPE, "trap '' INT; exec \"$@\""
    command = ["/bin/sh", "-c", shell, "sh", *CONSOLE]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT) as process:
        say(process, ":interrupt\n")
        assert next_line(process) == "nothing is running\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(HANG_S) == 128 + signal.SIGINT


def test_a_reader_that_leaves_ends_it_without_a_traceback() -> None:
    source = "while True: print('flood')\n\n"
    with subprocess.Popen(
        CONSOLE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        say(process, source)
        assert next_line(process) == "flood\n"
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.wait(HANG_S) == 128 + signal.SIGPIPE
        assert process.stderr.read() == ""


def test_a_pipe_needs_no_prompt_toolkit() -> None:
    hidden = "import sys; sys.modules['prompt_toolkit'] = None; "
    start = "from capsule_tasks.sessions.__main__ import main; sys.exit(main())"
    command = [sys.executable, "-c", hidden + start]
    ended = subprocess.run(
        command, input="6 * 7", capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert (ended.stdout, ended.stderr, ended.returncode) == ("42\n", "", 0)


def test_standard_input_may_be_closed() -> None:
    closed = ["/bin/sh", "-c", 'exec "$@" <&-', "sh", *CONSOLE]
    assert subprocess.run(closed, timeout=HANG_S, cwd=ROOT, check=False).returncode == 0


# --- options --------------------------------------------------------------------------------------


def test_warmup_runs_before_the_first_line() -> None:
    for option in ("-c", "--warmup"):
        assert console("x\n", option, "x = 5").stdout == "5\n"


def test_a_warmup_that_fails_is_an_error() -> None:
    ended = console("1\n", "--warmup", "1 / 0")
    assert (ended.stdout, ended.returncode) == ("", 1)
    assert "ZeroDivisionError" in ended.stderr


def test_cwd_is_the_directory_of_the_child(tmp_path: Path) -> None:
    assert console("import os; os.getcwd()\n", "--cwd", str(tmp_path)).stdout == f"'{tmp_path}'\n"
    ended = console("", "--cwd", str(tmp_path / "missing"))
    assert ended.returncode == 1
    assert "missing" in ended.stderr


def test_memory_limits_the_child() -> None:
    ended = console("big = bytearray(2 << 30)\n", "--memory", "1G")
    assert "MemoryError" in ended.stderr


@pytest.mark.parametrize("options", [["--memory", "much"], ["--memory", "1K"], ["--bogus"]])
def test_options_that_make_no_sense_are_refused(options: list[str]) -> None:
    ended = console("", *options)
    assert ended.returncode == 2
    assert ended.stderr.startswith("usage: python -m capsule_tasks.sessions")


# --- commands -------------------------------------------------------------------------------------


MISUNDERSTOOD = {
    ":bogus": "there is no command :bogus; :help lists them",
    ":": "there is no command :; :help lists them",
    ":checkpoint": "usage: :checkpoint FILE",
    ":checkpoint a b": "usage: :checkpoint FILE",
    ":restore": "usage: :restore FILE [merge|replace]",
    ":restore 'unclosed": ":restore 'unclosed: No closing quotation",
    ":restore file mix": "unknown mode 'mix': merge keeps other names, replace drops them",
    ":names all": "usage: :names",
}


def test_an_invalid_command_is_explained_and_the_session_goes_on() -> None:
    ended = console("\n".join([*MISUNDERSTOOD, "'on'", ""]))
    shown = ended.stderr.splitlines()
    assert shown == [f"CommandError: {answer}" for answer in MISUNDERSTOOD.values()]
    assert ended.stdout == "'on'\n"


def test_help_names_every_command() -> None:
    shown = console(":help\n").stdout
    commands = "help info names stack checkpoint restore interrupt restart quit"
    for command in commands.split():
        assert f"\n:{command}" in f"\n{shown}"


def test_info_and_names_tell_of_the_session() -> None:
    shown = console("x = 1\nmy_password = 'sesame'\n1 / 0\n:info\n:names\n").stdout
    assert "3, 1 of them with an error" in shown
    assert "ZeroDivisionError: division by zero" in shown
    assert f"Python {sys.version.split()[0]}" in shown
    assert "x            int, 28 bytes\n" in shown
    assert "my_password  (withheld)\n" in shown
    assert "sesame" not in shown


def test_stack_and_interrupt_of_an_idle_session() -> None:
    shown = console(":stack\n:interrupt\n").stdout
    assert "thread MainThread" in shown
    assert "nothing is running" in shown


def test_a_checkpoint_outlives_the_console(tmp_path: Path) -> None:
    file = tmp_path / "my names"
    saved = console(f"x = 1\ndef f(): return x\n\nlock = __import__('_thread').allocate_lock()\n"
                    f":checkpoint '{file}'\n")  # fmt: skip
    assert "not saved: lock: " in saved.stdout
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    restored = console(f"y = 2\n:restore '{file}'\nf(), y\n")
    assert restored.stdout == "restored 2 names: f, x\n(1, 2)\n"
    replaced = console(f"y = 2\n:restore '{file}' replace\n'y' in globals()\n")
    assert replaced.stdout.endswith("False\n")


def test_a_checkpoint_replaces_its_file_whole_or_not_at_all(tmp_path: Path) -> None:
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.write_bytes(b"older")
    file.chmod(0o644)
    folder.mkdir()
    console(f"x = 1\n:checkpoint {file}\n")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.read_bytes() != b"older"
    assert console(f":checkpoint {folder}\n").returncode == 1
    assert sorted(tmp_path.iterdir()) == [file, folder]


def test_restoring_an_invalid_checkpoint_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"no checkpoint")
    ended = console(f"x = 1\n:restore {file} replace\nx\n")
    assert ended.stdout == "1\n"
    assert "the namespace was not restored" in ended.stderr


def test_a_restart_after_the_child_died_starts_a_new_child() -> None:
    ended = console("import os; os._exit(3)\n1\n:restart\n2\n")
    assert ended.stdout.endswith("it has no names\n2\n")
    assert "SessionLost: the child exited with status 3\n" in ended.stderr
    assert "SessionStateError" in ended.stderr
