"""Shared by all benchmarks: one environment for all sides, percentiles, bars, printouts."""

from __future__ import annotations

import json
import math
import operator
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

_INTERPRETER_SETTINGS = (
    "PYTHONDONTWRITEBYTECODE",
    "PYTHONHASHSEED",
    "PYTHONOPTIMIZE",
    "PYTHONPROFILEIMPORTTIME",
    "PYTHONUNBUFFERED",
    "PYTHONWARNINGS",
)
_CPU_CLOCK_OF_PROCESS = 2
"""How Linux spells the CPU clock of another process, as clock_getcpuclockid(3) does."""
_COMPARE = {"<": operator.lt, "<=": operator.le, ">=": operator.ge}


class Bar(NamedTuple):
    """A figure and what it must be."""

    figure: str
    compare: str
    limit: float

    def holds(self, figures: Mapping[str, float]) -> bool:
        return bool(_COMPARE[self.compare](figures[self.figure], self.limit))


def use_plain_interpreters() -> None:
    """Have every child of every side start as a user's would, whatever this shell has set."""
    for name in _INTERPRETER_SETTINGS:
        os.environ.pop(name, None)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of them do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def p50_ms(seconds: Sequence[float]) -> float:
    return median(seconds) * 1000


def p99_ms(seconds: Sequence[float]) -> float:
    return percentile(seconds, 0.99) * 1000


@contextmanager
def timed(seconds: list[float]) -> Iterator[None]:
    """Append how long the block took."""
    begun = time.perf_counter()
    yield
    seconds.append(time.perf_counter() - begun)


@contextmanager
def apart(pids: Sequence[int]) -> Iterator[None]:
    """Keep this process on one core and those on another, where there are two.

    Left alone, the kernel puts an echo now on one core (15 µs), now on two (50 µs), for reasons
    of its own. The same placement for both sides makes the ratio repeatable.
    """
    cores = sorted(os.sched_getaffinity(0))
    try:
        _keep_on(os.getpid(), {cores[0]})
        for pid in pids:
            _keep_on(pid, {cores[-1]})
        yield
    finally:
        for pid in (os.getpid(), *pids):
            _keep_on(pid, set(cores))


def _keep_on(pid: int, cores: set[int]) -> None:
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)


def cpu_s(pids: Sequence[int]) -> float:
    """CPU seconds used so far by these processes, threads that have ended included.

    To the nanosecond: the times in `/proc/PID/stat`, which psutil reads, come in steps of 10 ms.
    """
    return sum(time.clock_gettime_ns(~pid << 3 | _CPU_CLOCK_OF_PROCESS) for pid in pids) / 1e9


def report(figures: Mapping[str, float], bars: Sequence[Bar], *, as_json: bool) -> None:
    """Print the figures and which bars hold: as a table, or as one line of JSON."""
    if as_json:
        print(json.dumps(_document(figures, bars)), flush=True)
        return
    bar_of = {bar.figure: bar for bar in bars}
    width = max(map(len, figures))
    for name, value in figures.items():
        line = f"{name:<{width}}  {value:>10.3f}"
        bar = bar_of.get(name)
        if bar is not None:
            line += f"  {bar.compare:>2} {bar.limit:<6g} {'pass' if bar.holds(figures) else 'FAIL'}"
        print(line)
    missed = [bar.figure for bar in bars if not bar.holds(figures)]
    print("every bar holds" if not missed else f"bars missed: {', '.join(missed)}", flush=True)


def _document(figures: Mapping[str, float], bars: Sequence[Bar]) -> dict[str, Any]:
    judged = {
        bar.figure: {"bar": f"{bar.compare} {bar.limit:g}", "pass": bar.holds(figures)}
        for bar in bars
    }
    rounded = {name: round(value, 4) for name, value in figures.items()}
    return {**rounded, "bars": judged, "pass": all(bar.holds(figures) for bar in bars)}
