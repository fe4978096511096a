"""Unacknowledged messages in kombu's own keys: reserve those whose worker died."""

from __future__ import annotations

from dataclasses import dataclass

from capsule_tasks.storage.keys import renewal_marks
from capsule_tasks.storage.scripts import Call, Code, script

MAX_TAGS = 100


@script("workers/unacked_claim")
def unacked_claim(
    index: str,
    marks: str,
    *,
    now_s: str,
    renewed_s: str,
    other_s: str,
    reserve_s: str,
    max_tags: int,
) -> None: ...


@dataclass(frozen=True)
class Overdue:
    """When an unacknowledged message counts as abandoned by its worker."""

    renewed_s: float
    other_s: float
    reserve_s: float = 10.0


def claim(index: str, overdue: Overdue, now_s: float) -> Call:
    """Reserve up to MAX_TAGS overdue messages for this caller, which requeues them."""
    return unacked_claim.call(
        index,
        renewal_marks(index),
        now_s=f"{now_s:.6f}",
        renewed_s=f"{overdue.renewed_s:.6f}",
        other_s=f"{overdue.other_s:.6f}",
        reserve_s=f"{overdue.reserve_s:.6f}",
        max_tags=MAX_TAGS,
    )


def claimed(reply: list[bytes]) -> list[str]:
    """The delivery tags in the reply to `claim`."""
    assert int(reply[0]) == Code.DONE
    return [tag.decode() for tag in reply[1:]]
