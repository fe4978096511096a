"""The context that callbacks and tools of a run are given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from capsule_tasks.runs.records import CodeSession, Spent

if TYPE_CHECKING:
    from capsule_tasks.runs.agents.agent import Agent


@dataclass(kw_only=True)
class RunContext:
    """The run that a callback works for. It lives in one process, and is never stored."""

    run_id: str
    session_id: str | None = None
    """The history's session, if the run has one."""
    context: Any = None
    """The object that the caller gave to the run."""
    turn: int = 0
    usage: Spent = field(default_factory=Spent)
    """The usage of the run so far."""


@dataclass(kw_only=True)
class ToolContext(RunContext):
    """A tool call of a run."""

    agent: Agent
    tool: str
    """`ToolKey.text` of the tool."""
    call_id: str
    key: str
    """Unique among the calls of the run, also those of agents that are used as tools."""
    arguments: str
    is_repeat: bool = False
    """Whether the call may have been made before, by a process that was lost."""
    code: CodeSession | None = None
    """The session in which the run's code runs, as the run has last seen it."""
    publish: Callable[[str, Any], None] | None = None
    """Publishes an event of the run, of a kind and with data that JSON has. None if nobody
    watches."""

    def note_code(self, code: CodeSession) -> None:
        """Have the run remember how far it has seen its code session."""
        self.code = code
