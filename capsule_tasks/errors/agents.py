"""Errors that end a run of our own engine, and what they know about that run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from capsule_tasks.errors.base import CallerError, CapsuleError, RetryError, described


class RunStopped(CapsuleError):
    """An error that ended a run in process; the run can go on from its `state`."""

    state: Any = None
    """The run's `RunState` after its last completed turn; None for errors outside of a run."""
    items: Sequence[Any] = ()
    """The items that this call of the run has stored, or holds if it has no session."""
    _rewind: Callable[[], Awaitable[Any]] | None = None

    def keep(self, state: Any, items: Sequence[Any], rewind: Callable[[], Awaitable[Any]]) -> None:
        """Keep what the run, which this error ends, has come to."""
        self.state, self.items, self._rewind = state, items, rewind

    async def rewind(self) -> Any:
        """Remove exactly what this call of the run has stored, or nothing.

        The answer, a `PoppedSuffix`, says which. Nothing is removed once others have appended to
        the history.
        """
        if self._rewind is None:
            raise NotRewound("it has no session, or comes from another process")
        return await self._rewind()

    def __reduce__(self) -> tuple[Any, ...]:
        make, args, *_ = super().__reduce__()
        return make, args, {name: each for name, each in vars(self).items() if name != "_rewind"}


@described("the run of agent {agent!r} has made its {max_turns} turns without a final output")
class MaxTurnsExceeded(RunStopped, CallerError, RuntimeError):
    """The run has asked its models as often as it may. It goes on from `state` with more turns."""

    agent: str
    max_turns: int


@described("the {kind} guardrail {guardrail!r} of agent {agent!r} tripped")
class GuardrailTripped(RunStopped, CallerError, RuntimeError):
    """A guardrail has ended the run. `kind` is `input`, `output`, `tool_input` or `tool_output`.

    After an input that tripped one, the history has that input; after an output, all but the
    final message.
    """

    guardrail: str
    kind: str
    agent: str
    info: object = None


@described("the guardrail {guardrail!r} gave no verdict: {reason}")
class GuardrailFailed(RunStopped, CallerError, RuntimeError):
    """A guardrail raised an error, or was cancelled. What it was to check is not in the history."""

    guardrail: str
    reason: str


@described("the tool {tool!r} failed: {reason}")
class ToolFailed(RunStopped, CallerError, RuntimeError):
    """A tool whose errors are not for the model (`on_error="raise"`) has raised one."""

    tool: str
    reason: str


@described("{what} of agent {agent!r} failed: {reason}")
class CallbackFailed(RunStopped, CallerError, RuntimeError):
    """A function that the program gave to an agent or a run has raised an error."""

    what: str
    agent: str
    reason: str


@described("a completed turn could not be stored: {reason}")
class TurnNotStored(RunStopped, RetryError, RuntimeError):
    """The history did not take the items of a turn; they are in `unsaved`. Its tools were called.

    The cause is the error of the history.
    """

    reason: str
    unsaved: Sequence[Any] = ()


@described("the history was not rewound: {reason}")
class NotRewound(CallerError, RuntimeError):
    """Whether the items of a failed run were removed is unknown: call its `rewind()` again."""

    reason: str


@described("{called} blocks, and was called inside a running event loop: {instead}")
class LoopIsRunning(CallerError, RuntimeError):
    """A call that blocks was made where it would stop everything else of the event loop."""

    called: str
    instead: str
