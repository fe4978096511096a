"""The target of a console: a session of this process, or a named session of a cluster."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Protocol

from capsule_tasks.protocol.events import EventMessage, UnknownEvent
from capsule_tasks.protocol.messages import InputRequest, Message
from capsule_tasks.sessions.console.commands import Commands
from capsule_tasks.sessions.console.frontend import Frontend

Shown = Message | EventMessage | UnknownEvent
"""A message of a session's child, or an event of an execution of a cluster."""


class Target(Protocol):
    """Runs one piece of code after the other. Execution ids are chosen by the console."""

    @property
    def commands(self) -> Commands: ...

    async def start(self, frontend: Frontend, is_idle: Callable[[], bool]) -> str:
        """Get ready; what to greet a person with. `is_idle`: neither code nor a command runs."""

    async def stop(self) -> None:
        """Leave in order."""

    async def kill(self) -> None:
        """Leave at once; called where a person has interrupted `stop`."""

    def execute(self, source: str, execution_id: str) -> AsyncGenerator[Shown, None]:
        """Run code; its messages in order, the last one a `Result`, an `Error` or an `Ended`."""

    async def answer(self, question: InputRequest, line: str | None) -> None:
        """Answer a question of the code; None ends its input. Raises a CallerError if too late."""

    async def cancel(self, execution_id: str) -> str:
        """Stop code. `not_running` if there was nothing to stop; empty if the end tells how."""
