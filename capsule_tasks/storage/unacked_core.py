"""Messages that workers hold, in kombu's own keys: which of them nobody holds any more."""

from __future__ import annotations

from dataclasses import dataclass

from capsule_tasks.storage.keys import unacked_marks
from capsule_tasks.storage.scripts import Call, Code, script

_CLAIM = script("unacked_claim", keys="index marks", args="now_s renewed_s other_s hold_s most")
MOST = 100


@dataclass(frozen=True)
class Overdue:
    """When a held message counts as left behind."""

    renewed_s: float
    other_s: float
    hold_s: float = 10.0


def claim(index: str, overdue: Overdue, now_s: float) -> Call:
    """Take up to MOST of them; the caller puts them back, and nobody else does for a while."""
    args: list[str | bytes | int] = [
        f"{now_s:.6f}",
        f"{overdue.renewed_s:.6f}",
        f"{overdue.other_s:.6f}",
        f"{overdue.hold_s:.6f}",
        MOST,
    ]
    return Call(_CLAIM, (index, unacked_marks(index)), args)


def claimed(reply: list[bytes]) -> list[str]:
    """The tags in the answer to that."""
    assert int(reply[0]) == Code.DONE
    return [tag.decode() for tag in reply[1:]]
