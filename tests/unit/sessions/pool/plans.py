"""Plans of pools whose slots are named by their numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from capsule_tasks.sessions.pool.plan import PoolPlan
from capsule_tasks.settings import PoolSettings


class Plan(PoolPlan):
    """Tests name slots by their numbers, in events and in actions."""

    def decide(self, now: float) -> list[Any]:
        return [
            action._replace(slot=action.slot.number) if hasattr(action, "slot") else action
            for action in super().decide(now)
        ]


def by_number(event: Callable[..., Any]) -> Callable[..., Any]:
    def call_by_number(plan: PoolPlan, slot: Any, *details: Any, **named: Any) -> Any:
        slot = plan.slots[slot] if isinstance(slot, int) else slot
        return event(plan, slot, *details, **named)

    return call_by_number


EVENTS = (
    PoolPlan.started,
    PoolPlan.start_failed,
    PoolPlan.released,
    PoolPlan.reported,
    PoolPlan.heartbeat_missed,
    PoolPlan.retire_when_idle,
    PoolPlan.lost,
    PoolPlan.stopped,
)
for event in EVENTS:
    setattr(Plan, event.__name__, by_number(event))


def make(**changes: object) -> Any:
    changes.setdefault("fresh", False)
    return Plan(PoolSettings(**changes))  # type: ignore[arg-type]
