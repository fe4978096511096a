"""What a worker shows of its pool: statistics, health, the stack of a task."""

from __future__ import annotations

import time
from typing import Any, get_args

from capsule_tasks.errors import CapsuleError
from capsule_tasks.sessions import SessionPool
from capsule_tasks.taskpool.crew import MOST_BARREN, Crew, Kind, Member
from capsule_tasks.taskpool.frames import only_task_frames

_MOST_IDS = 20
"""Of the coroutines that run in one session."""


def members(crew: Crew) -> list[Member]:
    """Every child that is there; on any thread."""
    return [member for kind in get_args(Kind) for member in list(crew.members[kind])]


def settings(options: dict[str, Any], size: int) -> dict[str, Any]:
    """What the pool was told, in the words of prefork."""
    return {
        "max-concurrency": size,
        "max-tasks-per-child": options.get("maxtasksperchild") or "N/A",
        "max-memory-per-child-kb": options.get("max_memory_per_child") or "N/A",
        "timeouts": [options.get("soft_timeout") or 0, options.get("timeout") or 0],
        "writes": "N/A",
    }


def describe(member: Member) -> dict[str, Any]:
    """One child."""
    info = member.session.info
    beat, beat_at = info.last_heartbeat, info.last_heartbeat_at
    return {
        "id": info.session_id,
        "kind": member.kind,
        "pid": member.pid,
        "state": str(info.state),
        "tasks": member.taken,
        "running": list(info.running)[:_MOST_IDS],
        "rss-kb": beat.rss_bytes // 1024 if beat is not None else None,
        "heartbeat-age-s": round(time.monotonic() - beat_at, 1) if beat_at is not None else None,
        "unresponsive": info.health.unresponsive,
        "leaving": member.worn or None,
    }


def totals(crew: Crew, sessions: SessionPool, jobs: int) -> dict[str, Any]:
    """The pool as a whole."""
    pool = sessions.info("blocking")
    return {
        "jobs": jobs,
        "waiting": sum(len(waiting) for waiting in crew.waiting.values()),
        "children-lost": crew.totals["children_lost"],
        "hard-limits": crew.totals["hard_limits"],
        "starts": pool.starts_total,
        "start-failures": pool.start_failures_total,
        "breaker-open": pool.breaker_open,
        "template-pid": pool.template_pid,
        "last-error": crew.last_error or pool.last_error,
        "healthy": not _complaints(crew, sessions),
    }


def health(crew: Crew, sessions: SessionPool, jobs: int) -> dict[str, Any]:
    """Whether the pool can do its work, why not, and each child."""
    return {
        **totals(crew, sessions, jobs),
        "reasons": _complaints(crew, sessions),
        "sessions": [describe(member) for member in members(crew)],
    }


def _complaints(crew: Crew, sessions: SessionPool) -> list[str]:
    found = [
        f"{kind} children do not become ready: {crew.last_error or pool.last_error}"
        for kind in get_args(Kind)
        if crew.size[kind] and (pool := sessions.info(kind)).breaker_open
    ]
    if crew.barren > MOST_BARREN:
        found.append(f"children end before their first task, {crew.barren} in a row")
    found += [
        f"{len(crew.waiting[kind])} {kind} tasks wait: each child takes nothing new, and has yet "
        "to finish what it began"
        for kind in get_args(Kind)
        if crew.is_worn_out(kind)
    ]
    return found + [
        f"session {member.session.session_id} (process {member.pid}) does not answer"
        for member in members(crew)
        if member.session.info.health.unresponsive
    ]


async def stack(crew: Crew, task_id: str, *, all_frames: bool) -> dict[str, str]:
    """Where a running task is, on the runtime's loop; or why nobody can say."""
    for member in members(crew):
        for execution_id, job in member.jobs.items():
            if job.call.task_id == task_id:
                try:
                    text = await member.session.stack(execution_id)
                    return {"ok": text if all_frames else only_task_frames(text)}
                except (CapsuleError, TimeoutError) as fault:
                    return {"error": f"task {task_id!r}: {fault}"}
    return {"error": f"task {task_id!r} does not run in this worker"}
