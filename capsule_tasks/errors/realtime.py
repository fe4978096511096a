"""Errors of realtime sessions."""

from __future__ import annotations

from capsule_tasks.errors.base import CallerError, RetryError, described


@described("the realtime session is {state}")
class RealtimeClosed(CallerError, RuntimeError):
    """Something was asked of a session that is not open, or not open any more."""

    state: str


@described("the realtime model {model} has a connection already, and serves one session at a time")
class RealtimeInUse(CallerError, RuntimeError):
    """A second connection was asked of a realtime model: give each session a model of its own."""

    model: str


@described("the connection to the realtime model is lost: {reason}")
class RealtimeLost(RetryError, ConnectionError):
    """There is no connection to the model's server. A new session goes on with the history."""

    reason: str


@described("the realtime model refused {what}: {reason}")
class RealtimeRefused(CallerError, RuntimeError):
    """The model's server has refused a message; what held before holds still."""

    what: str
    reason: str
    code: str | None = None


@described("the realtime model did not answer {what} within {timeout_s:g} s")
class RealtimeNoAnswer(RetryError, TimeoutError):
    """The model's server has not said whether it accepts a message."""

    what: str
    timeout_s: float


@described("history {history!r} has not stored the rest of the conversation within {timeout_s:g} s")
class HistoryNoAnswer(RetryError, TimeoutError):
    """A write to the history of a session that closes goes on; `close()` waits for it again."""

    history: str
    timeout_s: float


@described("agent {agent!r} has taken over since")
class AgentReplaced(CallerError, RuntimeError):
    """A handoff of an agent that the model does not work as any more was not made."""

    agent: str
    """The current agent."""
