"""Tables and displays that rich draws: `ps`, `top` and the progress of a group."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterable, Iterator

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from capsule_tasks.cli import views
from capsule_tasks.cli.terminal import cleaned
from capsule_tasks.client import GroupState
from capsule_tasks.storage.executions.types import RecentEntry

_COLOURS = {
    "running": "cyan",
    "waiting": "yellow",
    "succeeded": "green",
    "failed": "red",
    "lost": "red",
    "cancelled": "magenta",
}
_WIDTH_OF_A_PIPE = 10_000
"""Wide enough that piped text is never wrapped."""


def can_redraw() -> bool:
    """Whether standard output is a terminal that can redraw lines."""
    return _console().is_interactive


def print_table(entries: list[RecentEntry]) -> None:
    """Print one execution per line, in colours if standard output is a terminal."""
    _console().print(_table(entries))


class FullScreen(Live):
    """Shows queues, warnings and executions on an alternate screen, within the block."""

    def __init__(self) -> None:
        super().__init__(console=_console(), screen=True, auto_refresh=False)

    def draw(
        self, lengths: dict[str, int | None], warnings: list[str], entries: list[RecentEntry]
    ) -> None:
        lines = map(Text.from_ansi, [views.queued_line(lengths), *warnings])
        self.update(Group(*lines, _table(entries)), refresh=True)


def with_progress(states: Iterable[GroupState]) -> Iterator[GroupState]:
    """Yield the states, and show each as a bar in the same line, with failures above the bar."""
    columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}", markup=False)
    with Progress(*columns, console=_console(), auto_refresh=False) as progress:
        bar = progress.add_task("")
        for state in states:
            for failure in state.failures:
                line = Text.from_ansi(views.failure_line(failure))
                progress.console.print(line, soft_wrap=True)
            counts = views.counts(state)
            progress.update(bar, description=counts, total=state.total, completed=state.done)
            progress.refresh()
            yield state


def _console() -> Console:
    # Not left to rich, which would also obey environment variables such as FORCE_COLOR.
    is_terminal = False
    with contextlib.suppress(AttributeError):  # None where standard output was closed
        is_terminal = sys.stdout.isatty()
    return Console(force_terminal=is_terminal, width=None if is_terminal else _WIDTH_OF_A_PIPE)


def _table(entries: list[RecentEntry]) -> Table:
    now = time.time()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("ID", "STATE", "TASK", "WORKER", "TIME"):
        table.add_column(name, no_wrap=name in ("ID", "STATE", "TIME"), overflow="fold")
    for entry in entries:
        table.add_row(
            _text(entry.execution_id),
            Text(entry.state, _COLOURS.get(entry.state, "")),
            _text(entry.task),
            _text(entry.worker),
            _duration(entry, now),
        )
    return table


def _text(text: str) -> Text:
    """Text that a task may have chosen, without control sequences other than colours."""
    return Text.from_ansi(cleaned(text))


def _duration(entry: RecentEntry, now: float) -> str:
    if entry.started_at is None:
        return ""
    end = now if entry.state == "running" else entry.recorded_at
    seconds = max(0.0, end - entry.started_at)
    return f"{seconds:.1f} s" if seconds < 600 else f"{seconds / 60:.0f} min"
