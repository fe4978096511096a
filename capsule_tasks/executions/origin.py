"""The facts that decide about an execution's life and never change."""

from __future__ import annotations

import msgspec


class Origin(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Made once, before the execution is admitted."""

    execution_id: str
    task: str
    is_async: bool = False
    """A coroutine shares its child with others."""
    group: str = ""
    index: int = -1
    """The index in the group."""
    is_retry: bool = False
    is_redelivered: bool = False
    acks_late: bool = False
    ack_waits_for_claim: bool = False
    """The message is acknowledged early, and the acknowledgement can wait for the claim."""
    needs_claim: bool = False
    """The execution, a call of a named session, never runs without a sure claim: another worker may
    have the session by then. No message stands behind it, and its end is reported once stored."""
    claims_with_output: bool = False
    """The execution, a durable run, starts at once and is claimed with its first event or its end:
    it publishes nothing before it has the run, and then nobody else has. An attempt that ends
    before that, for another one, leaves no trace."""
    redelivers_when_lost: bool = False
    """The same message is delivered again when the child that ran it is lost."""
    continues_after_loss: bool = False
    """Another attempt follows when the child is lost: of the same message, or of a retry."""
    redelivers_over_limit: bool = False
    """The same message is delivered again after its hard time limit."""
    soft_limit_s: float | None = None
    hard_limit_s: float | None = None
