"""Answers about the pool: statistics, health, the stack of a task."""

from __future__ import annotations

import time
from typing import Any

from capsule_tasks.errors import CapsuleError
from capsule_tasks.executions.lanes import Child
from capsule_tasks.executions.supervisor import Supervisor
from capsule_tasks.sessions.pool.plan import EARLY_EXITS
from capsule_tasks.taskpool.reporting.task_frames import only_task_frames

_MAX_IDS = 20
"""How many running coroutines of one session are listed at most."""


def describe(child: Child) -> dict[str, Any]:
    """One child."""
    info = child.session.info
    beat, beat_at = info.last_heartbeat, info.last_heartbeat_at
    return {
        "id": info.session_id,
        "kind": child.kind,
        "pid": child.pid,
        "state": str(info.state),
        "tasks": child.slot.uses,
        "running": list(info.running)[:_MAX_IDS],
        "rss-kb": beat.rss_bytes // 1024 if beat is not None else None,
        "heartbeat-age-s": round(time.monotonic() - beat_at, 1) if beat_at is not None else None,
        "unresponsive": info.health.unresponsive,
        "retiring": child.slot.retire_reason or None,
    }


def totals(supervisor: Supervisor, tasks: int, last_error: str) -> dict[str, Any]:
    """The pool as a whole."""
    lanes = supervisor.dispatcher.lanes
    pool = lanes["blocking"].pool.info()
    return {
        "jobs": tasks,
        "waiting": sum(len(lane.waiting) for lane in lanes.values()),
        "children-lost": sum(lane.pool.info().lost_total for lane in lanes.values()),
        "hard-limits": supervisor.totals["hard_limits"],
        "starts": pool.starts_total,
        "start-failures": pool.start_failures_total,
        "breaker-open": pool.breaker_open,
        "template-pid": pool.template_pid,
        "last-error": last_error or pool.last_error,
        "healthy": not _complaints(supervisor, last_error),
    }


def health(supervisor: Supervisor, tasks: int, last_error: str) -> dict[str, Any]:
    """Whether the pool can do its work, the reasons if not, and each child."""
    return {
        **totals(supervisor, tasks, last_error),
        "reasons": _complaints(supervisor, last_error),
        "sessions": [describe(child) for child in supervisor.dispatcher.children()],
    }


def _complaints(supervisor: Supervisor, last_error: str) -> list[str]:
    found = []
    for kind, lane in supervisor.dispatcher.lanes.items():
        pool = lane.pool.info()
        if lane.size and pool.breaker_open:
            why = last_error or pool.last_error
            found.append(f"{kind} children do not become ready: {why}")
        if pool.early_exits > EARLY_EXITS:
            found.append(
                f"{kind} children end before their first task, {pool.early_exits} in a row"
            )
        if lane.is_stuck:
            found.append(
                f"{len(lane.waiting)} {kind} tasks wait: each child takes nothing new, and has yet "
                "to finish what it began"
            )
    return found + [
        f"session {child.session.session_id} (process {child.pid}) does not answer"
        for child in supervisor.dispatcher.children()
        if child.session.info.health.unresponsive
    ]


async def stack(supervisor: Supervisor, task_id: str, *, all_frames: bool) -> dict[str, str]:
    """The stack of a running task, or the error; on the runtime's loop."""
    execution = supervisor.running(task_id)
    if execution is None:
        return {"error": f"task {task_id!r} does not run in this worker"}
    try:
        text = await supervisor.dispatcher.stack(execution) or ""
    except (CapsuleError, TimeoutError) as fault:
        return {"error": f"task {task_id!r}: {fault}"}
    return {"ok": text if all_frames else only_task_frames(text)}
