"""The `:commands` of a console: how a line is read, and the commands that every console has."""

from __future__ import annotations

import dataclasses
import inspect
import shlex
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

from capsule_tasks.errors import CallerError
from capsule_tasks.protocol.messages import NamespaceEntry

_ALSO = """
Anything else is Python; `await` works at the top level. A blank line ends a block. Ctrl-C stops
what runs, Ctrl-D leaves. While code runs, these commands work too:
"""


class CommandError(CallerError):
    """A command was not understood."""


class Leave(Exception):
    """The person wants to go."""


@dataclasses.dataclass(frozen=True)
class Command:
    """`call(target, *words)` does it and returns what there is to show."""

    usage: str
    summary: str
    call: Callable[..., Coroutine[Any, Any, str]]
    works_while_running: bool = False

    @property
    def name(self) -> str:
        return self.usage.split()[0]


Commands = Mapping[str, Command]


def commands_of(*own: Command) -> Commands:
    """The commands of a console: its own, `:help` and `:quit`."""

    async def show_help(_target: object) -> str:
        return _help_text(known.values())

    commands = (
        Command(":help", "this list", show_help, works_while_running=True),
        *own,
        Command(":quit", "leave, as Ctrl-D does", _quit),
    )
    known = {command.name: command for command in commands}
    return known


def parse(
    commands: Commands, target: object, line: str
) -> tuple[Command, Callable[[], Coroutine[Any, Any, str]]]:
    """The command that a line names, and the call of it; CommandError if there is none."""
    try:
        name, *words = shlex.split(line)
    except ValueError as fault:
        raise CommandError(f"{line}: {fault}") from None
    if name not in commands:
        raise CommandError(f"there is no command {name}; :help lists them")
    command = commands[name]
    try:
        inspect.signature(command.call).bind(target, *words)
    except TypeError:
        raise CommandError(f"usage: {command.usage}") from None
    return command, lambda: command.call(target, *words)


def table(rows: list[tuple[str, str]]) -> str:
    """Names and texts in two columns."""
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def namespace_table(entries: Sequence[NamespaceEntry], total: int) -> str:
    """The names of a namespace, of which not all need be listed."""
    rows = [
        (entry.name, "(withheld)" if entry.redacted else f"{entry.type_name}, {entry.size} bytes")
        for entry in entries
    ]
    if total > len(rows):
        rows.append(("…", f"and {total - len(rows)} more"))
    return table(rows) or "no names yet"


def _help_text(commands: Iterable[Command]) -> str:
    usages = table([(command.usage, command.summary) for command in commands])
    also = " ".join(command.name for command in commands if command.works_while_running)
    return f"{usages}\n{_ALSO}{also}"


async def _quit(_target: object) -> str:
    raise Leave
