"""The processor time of a family: every second counts once, whoever reports it."""

from __future__ import annotations

import pytest

from capsule_tasks.system.cpu import FamilyCpu, Process
from capsule_tasks.system.usage import CpuTimes

CHILD, OTHER, THIRD = 1, 2, 3
Times = dict[int, tuple[float, float]]
"""Own time, and that of children that were waited for, by process."""


def used_s(*readings: Times) -> float:
    family = FamilyCpu()
    for reading in readings:
        members = {Process(pid, 0): CpuTimes(0, *times) for pid, times in reading.items()}
        family.read(members)
    return family.used_s


CASES: dict[str, tuple[tuple[Times, ...], float]] = {
    "one process": (({CHILD: (1, 0)}, {CHILD: (3, 0)}), 3),
    "a member beside the child": (({CHILD: (1, 0), OTHER: (2, 0)},), 3),
    "a member that was waited for": (
        ({CHILD: (1, 0), OTHER: (2, 0)}, {CHILD: (1, 2.5)}),
        3.5,
    ),
    "a member that is waited for one reading later": (
        ({CHILD: (1, 0), OTHER: (2, 0)}, {CHILD: (1, 0)}, {CHILD: (1, 2.5)}),
        3.5,
    ),
    "a member that nobody saw": (({CHILD: (1, 0)}, {CHILD: (1, 4)}), 5),
    "members that nobody waits for": (
        ({CHILD: (1, 0), OTHER: (2, 0)}, {CHILD: (1, 0), THIRD: (2, 0)}, {CHILD: (1, 0)}),
        5,
    ),
    "a member that one reading missed": (
        ({CHILD: (1, 0), OTHER: (2, 0)}, {CHILD: (1, 0)}, {CHILD: (1, 0), OTHER: (3, 0)}),
        4,
    ),
    "a family that is gone": (({CHILD: (1, 0), OTHER: (2, 0)}, {}, {}), 3),
}


@pytest.mark.parametrize("case", CASES)
def test_time_counts_once(case: str) -> None:
    readings, expected_s = CASES[case]
    assert used_s(*readings) == expected_s
