"""Where an execution comes from: everything that decides about its life and never changes."""

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
    """The place in the group."""
    is_retry: bool = False
    is_redelivered: bool = False
    acks_late: bool = False
    ack_waits_for_claim: bool = False
    """The message is acknowledged early, and whoever does so can wait until the claim is sure."""
    comes_again_when_lost: bool = False
    """The same message is delivered again when the child that ran it is lost."""
    continues_after_loss: bool = False
    """Another attempt follows when the child is lost: of the same message, or of one sent anew."""
    comes_again_over_limit: bool = False
    """The same message is delivered again after its hard time limit."""
    soft_limit_s: float | None = None
    hard_limit_s: float | None = None
