"""`scripts/bench lifecycle`: what the decisions about one ordinary task cost, without any I/O.

Events go into a lifecycle, and its actions into handlers that do nothing, found in a dict by their
type: all that an adapter adds is its own work. The figures are CPU time, the best of many short
rounds, so that whatever else the machine does counts as little as possible.
"""

from __future__ import annotations

import argparse
import time
import timeit
from collections.abc import Callable

from capsule_tasks.executions import actions as do
from capsule_tasks.executions.actions import Action
from capsule_tasks.executions.claims import Streaming
from capsule_tasks.executions.lifecycle import Lifecycle
from capsule_tasks.executions.origin import Origin
from capsule_tasks.executions.states import Report, Run
from capsule_tasks.protocol.messages import TaskResult
from tests.benchmarks._measure import Bar, report

TASKS_A_ROUND = 100
ROUNDS = 2_000
BARS = (
    Bar("lifecycle_us_per_task_late", "<=", 5.0),
    Bar("lifecycle_us_per_task_early", "<=", 5.0),
    Bar("lifecycle_us_per_task_unstreamed", "<=", 5.0),
)

_TRACED = TaskResult(execution_id="id", text="4", runtime_s=0.001, has_unread_raw=False)
_LATE = Origin(execution_id="id", task="app.add", acks_late=True)
_EARLY = Origin(execution_id="id", task="app.add", ack_waits_for_claim=True)


def _do_nothing(_action: Action) -> None:
    pass


_HANDLERS: dict[type[Action], Callable[[Action], None]] = dict.fromkeys(
    [
        action
        for action in vars(do).values()
        if isinstance(action, type) and issubclass(action, Action)
    ],
    _do_nothing,
)


def run_one(origin: Origin, streaming: Streaming) -> Lifecycle:
    """A new task that ends before its claim is due."""
    life = Lifecycle(origin)
    handlers = _HANDLERS
    for action in life.handle(Lifecycle.on_admitted, streaming):
        handlers[type(action)](action)
    for action in life.handle(Lifecycle.on_sent):
        handlers[type(action)](action)
    for action in life.handle(Lifecycle.on_child_started, 1.0):
        handlers[type(action)](action)
    for action in life.handle(Lifecycle.on_finished, _TRACED, None, 2.0):
        handlers[type(action)](action)
    if life.report is not Report.ENDED:
        for action in life.handle(Lifecycle.on_end_stored):
            handlers[type(action)](action)
    return life


def us_per_task(origin: Origin, streaming: Streaming) -> float:
    life = run_one(origin, streaming)
    assert life.run is Run.OVER
    assert life.report is Report.ENDED
    timer = timeit.Timer(lambda: run_one(origin, streaming), timer=time.process_time)
    return min(timer.repeat(ROUNDS, TASKS_A_ROUND)) / TASKS_A_ROUND * 1e6


def measure() -> dict[str, float]:
    return {
        "lifecycle_us_per_task_late": us_per_task(_LATE, Streaming.CLAIM_LATER),
        "lifecycle_us_per_task_early": us_per_task(_EARLY, Streaming.CLAIM_LATER),
        "lifecycle_us_per_task_unstreamed": us_per_task(_LATE, Streaming.NONE),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench lifecycle", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    as_json: bool = parser.parse_args().json
    report(measure(), BARS, as_json=as_json)


if __name__ == "__main__":
    main()
