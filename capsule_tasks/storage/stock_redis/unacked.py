"""Messages that workers hold, in kombu's own keys: which of them nobody holds any more."""

from __future__ import annotations

from dataclasses import dataclass

from capsule_tasks.storage.keys import renewal_marks
from capsule_tasks.storage.scripts import Call, Code, script

MOST = 100


@script
def unacked_claim(
    index: str, marks: str, *, now_s: str, renewed_s: str, other_s: str, hold_s: str, most: int
) -> None: ...


@dataclass(frozen=True)
class Overdue:
    """When a held message counts as left behind."""

    renewed_s: float
    other_s: float
    hold_s: float = 10.0


def claim(index: str, overdue: Overdue, now_s: float) -> Call:
    """Take up to MOST of them; the caller puts them back, and nobody else does for a while."""
    return unacked_claim.call(
        index,
        renewal_marks(index),
        now_s=f"{now_s:.6f}",
        renewed_s=f"{overdue.renewed_s:.6f}",
        other_s=f"{overdue.other_s:.6f}",
        hold_s=f"{overdue.hold_s:.6f}",
        most=MOST,
    )


def claimed(reply: list[bytes]) -> list[str]:
    """The tags in the answer to that."""
    assert int(reply[0]) == Code.DONE
    return [tag.decode() for tag in reply[1:]]
