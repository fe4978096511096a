"""Tables and progress that rich draws for `celery capsule`: plain in a pipe, safe on a terminal."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout

import pytest

from capsule_tasks.cli import screen
from capsule_tasks.client import Failure, GroupState
from capsule_tasks.storage.executions.types import RecentEntry

HOSTILE = "\x1b]0;title\x07[bold]a\x1b[2J\nb\x1b[31mc :smile:"


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def tty(monkeypatch: pytest.MonkeyPatch) -> Tty:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Tty()


def entry(**fields: str) -> RecentEntry:
    return RecentEntry("id-1", 12.0, "succeeded", started_at=10.5, **fields)


def test_a_table_in_a_pipe_is_plain_and_whole(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # a pipe still stays plain
    monkeypatch.setenv("COLUMNS", "20")
    screen.print_table([entry(task="shop.tasks." + "long" * 50, worker="celery@a"), entry()])
    header, first, second = capsys.readouterr().out.splitlines()
    assert header.split() == ["ID", "STATE", "TASK", "WORKER", "TIME"]
    assert first.rstrip() == f"id-1  succeeded  shop.tasks.{'long' * 50}  celery@a  1.5 s"
    assert second.split() == ["id-1", "succeeded", "1.5", "s"]
    assert second.index("1.5 s") == first.index("1.5 s") == header.index("TIME")


def test_an_empty_table_is_its_header(capsys: pytest.CaptureFixture[str]) -> None:
    screen.print_table([])
    assert capsys.readouterr().out.split() == ["ID", "STATE", "TASK", "WORKER", "TIME"]


def test_text_of_tasks_has_no_controls_in_a_pipe_and_is_no_markup(
    capsys: pytest.CaptureFixture[str],
) -> None:
    screen.print_table([entry(task=HOSTILE)])
    shown = capsys.readouterr().out.splitlines()[1]
    assert shown.isprintable()
    assert "[bold]a bc :smile:" in shown


def test_on_a_terminal_only_colours_pass(tty: Tty) -> None:
    with redirect_stdout(tty):
        screen.print_table([entry(task=HOSTILE)])
    shown = tty.getvalue()
    assert "\x1b[32msucceeded" in shown
    assert "[bold]a b\x1b[31mc :smile:" in shown
    assert "\x1b[2J" not in shown
    assert "title" not in shown


def test_a_table_fits_the_terminal_without_losing_text(
    tty: Tty, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    with redirect_stdout(tty):
        screen.print_table([entry(task="t" * 50, worker="w" * 50)])
    shown = re.sub(r"\x1b\[\d*m", "", tty.getvalue())
    assert max(map(len, shown.splitlines())) <= 60
    assert (shown.count("t"), shown.count("w")) == (50, 50)


def test_a_group_is_one_bar_with_its_failures_above(tty: Tty) -> None:
    failed = GroupState(2, {"failed": 1}, (Failure("id-1", HOSTILE),))
    ended = GroupState(2, {"failed": 1, "succeeded": 1})
    with redirect_stdout(tty):
        assert list(screen.with_progress([failed, ended])) == [failed, ended]
    shown = tty.getvalue()
    assert "id-1: [bold]a b" in shown
    assert "\x1b[2J" not in shown
    assert "1 failed, 1 succeeded" in shown


def test_top_draws_on_a_screen_of_its_own(tty: Tty) -> None:
    with redirect_stdout(tty), screen.FullScreen() as display:
        display.draw({"celery": 3, "other": None}, ["-- the broker is [unavailable]"], [entry()])
    shown = tty.getvalue()
    assert shown.index("\x1b[?1049h") < shown.index("queued: celery 3, other unknown")
    assert shown.index("[unavailable]") < shown.index("id-1") < shown.index("\x1b[?1049l")


def test_a_dumb_terminal_cannot_redraw(tty: Tty, monkeypatch: pytest.MonkeyPatch) -> None:
    with redirect_stdout(tty):
        assert screen.can_redraw()
        monkeypatch.setenv("TERM", "dumb")
        assert not screen.can_redraw()


def test_standard_output_may_be_closed() -> None:
    with redirect_stdout(None):
        assert not screen.can_redraw()
        screen.print_table([entry()])
