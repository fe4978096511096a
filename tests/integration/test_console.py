"""The interactive session at a real terminal."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterator

import pytest

from tests.sessions import until_exited
from tests.terminals import CTRL_C, CTRL_D, Terminal

STUBBORN = """if True:
    print('at', 'work')
    while True:
        try: time.sleep(60)
        except BaseException: pass

"""
UP, END = "\x1b[A", "\x1b[F"


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    """A console at its first prompt, with `os`, `sys` and `time` imported."""
    with Terminal() as terminal:
        terminal.shows(".*ready after.*")
        terminal.run("import os, sys, time")
        yield terminal


def pid_of(terminal: Terminal) -> int:
    return int(terminal.run("os.getpid()")[0])


def test_values_are_shown_and_none_is_not(terminal: Terminal) -> None:
    assert terminal.run("{1, 2}") == ["{1, 2}"]
    assert terminal.run("None") == []


def test_a_value_of_which_only_the_repr_arrived_is_marked(terminal: Terminal) -> None:
    assert terminal.run("sys") == ["<module 'sys' (built-in)>  # repr only, of type module"]


def test_a_blank_line_ends_a_block(terminal: Terminal) -> None:
    terminal.type("for i in range(2):\r")
    terminal.shows(r"\.\.\.")
    terminal.type("    print(i * 'x', i)\r\r")
    terminal.shows("x 1")
    assert " 0" in terminal.rows


def test_a_block_is_recalled_and_changed_as_a_whole(terminal: Terminal) -> None:
    terminal.type("for i in range(2):\r    print('a', i)\r\r")
    terminal.shows("a 1")
    terminal.at_prompt()
    terminal.type(f"{UP}{UP}{END}\x7f + 5)\r")  # in its second line, the last character
    terminal.shows("a 6")


def test_await_works_at_the_prompt(terminal: Terminal) -> None:
    terminal.run("import asyncio")
    assert terminal.run("await asyncio.sleep(0, 'slept')") == ["'slept'"]


def test_output_comes_while_the_code_still_runs(terminal: Terminal) -> None:
    terminal.type("print('begin', 1 + 1); _ = input(); print('end')\r")
    terminal.shows("begin 2")
    terminal.type("\r")
    terminal.shows("end")


def test_a_line_that_has_not_ended_is_shown_and_goes_on(terminal: Terminal) -> None:
    terminal.type("print('ab', end='', flush=True); _ = input(' c' + 'd? '); print('ef')\r")
    terminal.shows(r"ab cd\?")
    terminal.type("x\r")
    terminal.shows(r"ab cd\? x")
    assert terminal.run("print('gh', end='')") == ["gh"]


def test_a_progress_bar_writes_over_its_line(terminal: Terminal) -> None:
    assert terminal.run("for n in range(3): print(f'\\rstep {n}', end='')\r")[-1] == "step 2"


def test_errors_and_stderr_are_red_and_output_is_plain(terminal: Terminal) -> None:
    for line, colour in (
        ("print('fine')", "default"),
        ("print('bad', file=sys.stderr)", "red"),
        ("1 / 0", "red"),
    ):
        shown = terminal.run(line)
        assert terminal.colours(terminal.rows.index(shown[-1])) == {colour}
    assert shown[-1] == "ZeroDivisionError: division by zero"


def test_ctrl_c_stops_running_code_and_keeps_the_names(terminal: Terminal) -> None:
    terminal.run("kept = 41")
    terminal.type("print('at', 'work'); time.sleep(3600)\r")
    terminal.shows("at work")
    terminal.type(CTRL_C)
    terminal.shows("# interrupted after .*")
    assert any("ExecutionCancelled" in row for row in terminal.rows)
    assert terminal.run("kept + 1") == ["42"]


def test_ctrl_c_kills_a_child_that_will_not_stop_and_a_new_child_follows(
    terminal: Terminal,
) -> None:
    before = pid_of(terminal)
    terminal.run("kept = 41")
    terminal.type(STUBBORN)
    terminal.shows("at work")
    terminal.type(CTRL_C)
    terminal.shows(r".*cancelled \(killed\)")
    terminal.shows("# killed after .*")
    terminal.shows(".*a new one takes its place")
    assert "NameError" in terminal.run("kept")[-1]
    terminal.run("import os")
    assert pid_of(terminal) != before


def test_ctrl_c_at_an_idle_prompt_drops_the_line_and_the_block(terminal: Terminal) -> None:
    before = terminal.at_prompt()
    terminal.type("if True:\r")
    terminal.shows(r"\.\.\.")
    terminal.type("    1 / 0")
    terminal.shows(r"\.\.\.     1 / 0")
    terminal.type(CTRL_C)
    assert terminal.at_prompt() > before
    assert terminal.run("6 * 7") == ["42"]
    assert not any("ZeroDivisionError" in row for row in terminal.rows)


def test_ctrl_d_at_the_prompt_exits_and_ends_the_child(terminal: Terminal) -> None:
    pid = pid_of(terminal)
    terminal.run("1 / 0")
    terminal.type(CTRL_D)
    assert terminal.leave() == 0
    asyncio.run(until_exited(pid))


def test_quit_exits(terminal: Terminal) -> None:
    terminal.type(":quit\r")
    assert terminal.leave() == 0


def test_input_is_answered_at_the_terminal(terminal: Terminal) -> None:
    terminal.type("name = input('Who' + '? ')\r")
    terminal.shows(r"Who\?")
    terminal.type("Ada\r")
    terminal.shows(r"Who\? Ada")
    assert terminal.run("name") == ["'Ada'"]


def test_a_password_is_not_shown(terminal: Terminal) -> None:
    terminal.run("from getpass import getpass")
    terminal.type("length = len(getpass('Pass' + 'word? '))\r")
    terminal.shows(r"Password\?")
    terminal.type("sesame")
    terminal.shows(r"Password\? \*{6}")
    terminal.type("\r")
    assert terminal.run("length") == ["6"]
    assert "sesame" not in terminal.transcript
    terminal.type("_ = input('Shown' + '? ')\r")
    terminal.shows(r"Shown\?")
    terminal.type("visible\r")
    terminal.shows(r"Shown\? visible")


def test_ctrl_d_ends_the_input_of_the_code(terminal: Terminal) -> None:
    terminal.type("input('Who' + '? ')\r")
    terminal.shows(r"Who\?")
    terminal.type(CTRL_D)
    terminal.shows("EOFError.*")
    assert terminal.run("6 * 7") == ["42"]


def test_ctrl_c_stops_code_that_waits_for_input(terminal: Terminal) -> None:
    terminal.type("getpass = __import__('getpass').getpass('Pass' + 'word? ')\r")
    terminal.shows(r"Password\?")
    terminal.type(CTRL_C)
    terminal.shows("# interrupted after .*")
    assert terminal.run("6 * 7") == ["42"]
    terminal.shows(r">>> 6 \* 7")  # what is typed is shown again


def test_code_that_is_typed_ahead_is_noted(terminal: Terminal) -> None:
    terminal.type("print('at', 'work'); time.sleep(3600)\r")
    terminal.shows("at work")
    terminal.type("6 * 7\r")
    terminal.shows("# waits for the running code, .*: 6 \\* 7")
    terminal.type(CTRL_C)
    terminal.shows("42")


def test_commands_work_while_code_runs(terminal: Terminal) -> None:
    terminal.type("print('at', 'work'); time.sleep(3600)\r")
    terminal.shows("at work")
    terminal.type(":stack\r")
    terminal.shows("thread MainThread of execution.*")
    terminal.type(":bogus\r")
    terminal.shows(".*there is no command :bogus.*")
    terminal.type(":interrupt\r")
    terminal.shows("KeyboardInterrupt")


def test_lines_typed_ahead_run_afterwards_in_order(terminal: Terminal) -> None:
    terminal.type("print('at', 'work'); _ = input()\r")
    terminal.shows("at work")
    terminal.type("answer\r:restart\r'kept' in globals()\r")
    terminal.shows("False")
    rows = terminal.rows
    new_child = next(row for row in rows if row.startswith("a new child was ready"))
    order = ["answer", ">>> :restart", new_child, ">>> 'kept' in globals()", "False"]
    assert [row for row in rows if row in order] == order


@pytest.mark.parametrize("form", ["{}", "\x1b[200~{}\x1b[201~"], ids=["typed", "pasted"])
def test_a_script_runs_block_by_block(terminal: Terminal, form: str) -> None:
    script = "def double(n):\r    return n + n\rprint(double('ab'))\rdouble('cd')"
    terminal.type(form.format(script))
    terminal.type("\r")
    terminal.shows("abab")
    terminal.shows("'cdcd'")


def test_a_child_that_dies_behind_an_idle_prompt_is_reported(terminal: Terminal) -> None:
    terminal.run("import threading")
    terminal.type("threading.Timer(0.01, os._exit, [3]).start()\r")
    terminal.shows(".*exited with status 3.*")
    assert any("SessionStateError" in row for row in terminal.run("1 + 1"))
    assert re.match("a new child was ready", terminal.run(":restart")[0])
    assert terminal.run("1 + 1") == ["2"]


def test_late_output_is_shown_also_by_a_child_that_replaced_another(terminal: Terminal) -> None:
    terminal.type(STUBBORN)
    terminal.shows("at work")
    terminal.type(CTRL_C)
    terminal.shows(".*a new one takes its place")
    terminal.run("from threading import Timer")
    terminal.type("Timer(0.05, print, ['late', 1 + 1]).start()\r")
    terminal.shows("late 2")
    terminal.at_prompt()


def test_without_prompt_toolkit_the_error_names_the_package_to_install() -> None:
    hidden = "import sys; sys.modules['prompt_toolkit'] = None; "
    start = "from capsule_tasks.sessions.__main__ import main; sys.exit(main())"
    with Terminal([sys.executable, "-c", hidden + start]) as terminal:
        terminal.shows(r".*: pip install 'capsule-tasks\[console\]'")
        assert terminal.leave() == 1


def test_a_terminal_that_cannot_be_drawn_on_has_a_plain_prompt() -> None:
    with Terminal(term="dumb") as terminal:
        terminal.until(">>> ")
        terminal.type("len(__import__('getpass').getpass('Pass' + 'word? '))\n")
        terminal.until("Password? ")
        terminal.type("sesame\n")
        terminal.until("6\n>>> ")
        assert "sesame" not in terminal.transcript
        terminal.type("import time; print('at', 'work'); time.sleep(3600)\n")
        terminal.until("at work\n")
        terminal.type(CTRL_C)
        terminal.until("# interrupted after ")
        terminal.until(">>> ")
        terminal.type(CTRL_D)
        assert terminal.leave() == 0
