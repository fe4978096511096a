"""The interactive session at a real terminal."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.sessions import until_exited
from tests.terminals import CTRL_C, CTRL_D, Terminal, without_colour

STUBBORN = """if True:
    print('at', 'work')
    while True:
        try: time.sleep(60)
        except BaseException: pass

"""


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    """A console at its first prompt, with `time` imported and the child's pid on the screen."""
    with Terminal() as terminal:
        terminal.until("ready after")
        terminal.until(">>> ")
        terminal.run("import os, sys, time")
        yield terminal


def pid_of(terminal: Terminal) -> int:
    return int(terminal.run("os.getpid()"))


def test_values_are_shown_and_none_is_not(terminal: Terminal) -> None:
    assert terminal.run("{1, 2}") == "{1, 2}\n"
    assert terminal.run("None") == ""


def test_a_value_of_which_only_the_repr_arrived_is_marked(terminal: Terminal) -> None:
    shown = without_colour(terminal.run("sys"))
    assert shown == "<module 'sys' (built-in)>  # repr only, of type module\n"


def test_a_blank_line_ends_a_block(terminal: Terminal) -> None:
    terminal.type("for i in range(2):\n")
    terminal.until("... ")
    terminal.type("    print(i * 'x', i)\n")
    terminal.until("... ")
    terminal.type("\n")
    terminal.until("\n")
    assert terminal.until(">>> ") == " 0\nx 1\n"


def test_await_works_at_the_prompt(terminal: Terminal) -> None:
    terminal.run("import asyncio")
    assert terminal.run("await asyncio.sleep(0, 'slept')") == "'slept'\n"


def test_output_comes_while_the_code_still_runs(terminal: Terminal) -> None:
    terminal.type("print('begin', 1 + 1); input(); print('end')\n")
    terminal.until("begin 2\n")
    terminal.type("\n")
    terminal.until("\nend\n")


def test_errors_and_stderr_are_red_and_output_is_plain(terminal: Terminal) -> None:
    assert terminal.run("print('fine')") == "fine\n"
    assert terminal.run("print('bad', file=sys.stderr)") == "\x1b[31mbad\n\x1b[0m"
    shown = terminal.run("1 / 0")
    assert shown.startswith("\x1b[31mTraceback")
    assert "ZeroDivisionError: division by zero" in shown


def test_ctrl_c_stops_what_runs_and_keeps_the_names(terminal: Terminal) -> None:
    terminal.run("kept = 41")
    terminal.type("print('at', 'work'); time.sleep(3600)\n")
    terminal.until("at work\n")
    terminal.type(CTRL_C)
    assert "ExecutionCancelled" in terminal.until("# interrupted after ")
    terminal.until(">>> ")
    assert terminal.run("kept + 1") == "42\n"


def test_ctrl_c_kills_what_will_not_stop_and_a_new_child_follows(terminal: Terminal) -> None:
    before = pid_of(terminal)
    terminal.run("kept = 41")
    terminal.type(STUBBORN)
    terminal.until("at work\n")
    terminal.type(CTRL_C)
    terminal.until("cancelled (killed)")
    terminal.until("# killed after ")
    terminal.until("a new one takes its place")
    terminal.until(">>> ")
    assert "NameError" in terminal.run("kept")
    terminal.run("import os")
    assert pid_of(terminal) != before


def test_ctrl_c_at_an_idle_prompt_drops_the_line_and_the_block(terminal: Terminal) -> None:
    terminal.type("if True:\n")
    terminal.until("... ")
    terminal.type("    1 / 0")
    terminal.until("1 / 0")
    terminal.type_at_rest(CTRL_C)
    terminal.until("\n>>> ")
    assert terminal.run("6 * 7") == "42\n"
    assert "ZeroDivisionError" not in terminal.transcript


def test_ctrl_d_at_the_prompt_leaves_and_takes_the_child_along(terminal: Terminal) -> None:
    pid = pid_of(terminal)
    terminal.run("1 / 0")
    terminal.type(CTRL_D)
    assert terminal.leave() == 0
    asyncio.run(until_exited(pid))


def test_quit_leaves(terminal: Terminal) -> None:
    terminal.type(":quit\n")
    assert terminal.leave() == 0


def test_input_is_answered_at_the_terminal(terminal: Terminal) -> None:
    terminal.type("name = input('Who' + '? ')\n")
    terminal.until("Who? ")
    terminal.type("Ada\n")
    terminal.until(">>> ")
    assert terminal.run("name") == "'Ada'\n"


def test_a_password_is_not_shown(terminal: Terminal) -> None:
    terminal.run("from getpass import getpass")
    terminal.type("length = len(getpass('Pass' + 'word? '))\n")
    terminal.until("Password? ")
    terminal.type("sesame\n")
    terminal.until("\n>>> ")
    assert terminal.run("length") == "6\n"
    assert "sesame" not in terminal.transcript
    terminal.type("input('Shown' + '? ')\n")
    terminal.until("Shown? ")
    terminal.type("visible\n")
    terminal.until("visible\n")
    terminal.until("'visible'\n")


def test_ctrl_d_ends_the_input_of_the_code(terminal: Terminal) -> None:
    terminal.type("input('Who' + '? ')\n")
    terminal.until("Who? ")
    terminal.type(CTRL_D)
    assert "EOFError" in terminal.until(">>> ")
    assert terminal.run("6 * 7") == "42\n"


def test_ctrl_c_stops_code_that_waits_for_input(terminal: Terminal) -> None:
    terminal.type("getpass = __import__('getpass').getpass('Pass' + 'word? ')\n")
    terminal.until("Password? ")
    terminal.type(CTRL_C)
    terminal.until("# interrupted after ")
    terminal.until(">>> ")
    terminal.type_at_rest("6 * 7\n")
    terminal.until("6 * 7\n")  # the echo is on again
    assert terminal.until(">>> ") == "42\n"


def test_commands_work_while_code_runs(terminal: Terminal) -> None:
    terminal.type("print('at', 'work'); time.sleep(3600)\n")
    terminal.until("at work\n")
    terminal.type(":stack\n")
    terminal.until("thread MainThread of execution")
    terminal.type(":bogus\n")
    terminal.until("there is no command :bogus")
    terminal.type(":interrupt\n")
    terminal.until("KeyboardInterrupt")
    terminal.until(">>> ")


def test_lines_typed_ahead_run_afterwards_in_order(terminal: Terminal) -> None:
    terminal.type("print('at', 'work'); _ = input()\n")
    terminal.until("at work\n")
    terminal.type("answer\n:restart\n'kept' in globals()\n")
    terminal.until("a new child was ready")
    terminal.until("\nFalse\n")


def test_a_pasted_script_runs_line_by_line(terminal: Terminal) -> None:
    terminal.type("def double(n):\n    return n + n\nprint(double('ab'))\ndouble('cd')")
    terminal.until("\nabab\n")
    terminal.type("\n")
    terminal.until("\n'cdcd'\n")


def test_a_child_that_dies_behind_an_idle_prompt_is_reported(terminal: Terminal) -> None:
    terminal.run("import threading")
    terminal.type("threading.Timer(0.01, os._exit, [3]).start()\n")
    terminal.until("exited with status 3")
    terminal.until(">>> ")
    assert "SessionStateError" in terminal.run("1 + 1")
    assert "a new child was ready" in terminal.run(":restart")
    assert terminal.run("1 + 1") == "2\n"


def test_late_output_is_shown_also_by_a_child_that_replaced_another(terminal: Terminal) -> None:
    terminal.type(STUBBORN)
    terminal.until("at work\n")
    terminal.type(CTRL_C)
    terminal.until("a new one takes its place")
    terminal.until(">>> ")
    terminal.run("from threading import Timer")
    terminal.type("Timer(0.05, print, ['late', 1 + 1]).start()\n")
    terminal.until("late 2\n")
    terminal.until(">>> ")
