"""Errors of steps, and of calls that must not happen twice."""

from __future__ import annotations

from capsule_tasks.errors.base import CallerError, OperatorError, described


@described("call {call_id!r} was used before: {reason}")
class CallChanged(CallerError, ValueError):
    """An id that was used before came back with another tool or other arguments; nothing ran."""

    call_id: str
    reason: str


@described(
    "{name!r} started at {began_at} and did not finish ({reason}). Find out whether it happened; "
    "with retry=True it is made again"
)
class EffectUncertain(OperatorError):
    """A step started, and whether it was made is unknown; it is not made again by itself."""

    name: str
    began_at: str
    reason: str


@described("{name!r} was made, but its output cannot be stored: {reason}")
class OutputNotStorable(CallerError, TypeError):
    """A step was made, but what it returned cannot be stored; it is not made again."""

    name: str
    reason: str


@described("step {name!r}: {reason}")
class StepMisused(CallerError, TypeError):
    """A step was asked for in a way in which it cannot be kept."""

    name: object
    reason: str
