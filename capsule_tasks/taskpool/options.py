"""The pool's settings, read from the Celery app's configuration and from its worker's options.

Each setting of ours is named `capsule_…` in the app's configuration; the others are Celery's own.
"""

from __future__ import annotations

import logging
from difflib import get_close_matches
from typing import Any

from capsule_tasks.client.configuration import retention_settings
from capsule_tasks.client.redis_location import redis_url
from capsule_tasks.client.revokes import checked_revoke_ttl_s
from capsule_tasks.errors import InvalidSetting
from capsule_tasks.executions.publishing.loss_counter import LossCounter
from capsule_tasks.settings import (
    ChildSettings,
    ExecutorSettings,
    OutputSettings,
    PoolSettings,
    Profile,
    RoutingSettings,
    SessionConfig,
    TaskChildSettings,
    TimeoutSettings,
)

log = logging.getLogger("capsule_tasks.taskpool")

KIB = 1024
_WAITING = ExecutorSettings().max_waiting

DEFAULTS: dict[str, Any] = {
    "capsule_start": "fork",
    "capsule_async_children": 1,
    "capsule_async_limit": 1000,
    "capsule_loss_limit": 5,
    "capsule_ready_s": 60.0,
    "capsule_child_stop_s": 5.0,
    "capsule_streams": True,
    "capsule_redis_url": None,
    "capsule_prefix": "capsule",
    "capsule_output": "drop_oldest",
    "capsule_retention": {},
    "capsule_publish": {},
    "capsule_lease_s": 15.0,
    "capsule_worker_stop_s": 30.0,
}
"""
- `capsule_start`: `fork` copies the worker; `exec` imports the app in a fresh interpreter that is
  then copied; `cold` in a fresh interpreter for each child.
- `capsule_async_children`, `capsule_async_limit`: children for `async def` tasks, and how many
  such tasks each runs at once. They start with the first such task.
- `capsule_loss_limit`: how many children one message may cost, before it is not delivered again.
- `capsule_ready_s`: how long a child may take to become ready, imports included.
- `capsule_child_stop_s`: how long an idle child, and in a cold shutdown a task, may take to stop
  before it is killed.
- `capsule_worker_stop_s`: how much longer a worker that is stopping may take once no task runs, or
  while Redis does not answer, before it exits by force.
- `capsule_streams`: whether tasks have streams. `capsule_redis_url`: where those are; else the
  environment's `CAPSULE_REDIS_URL`, the broker, or the result backend, the first that is a Redis.
- `capsule_prefix`: what keys begin with.
- `capsule_output`: `drop_oldest` never waits for a reader; `block` never loses any output.
- `capsule_retention`: how much of an execution is retained, and how long (fields of
  `ExecutionSettings`); a task may have an attribute of the same name.
- `capsule_publish`: fields of `PublishSettings`.
- `capsule_lease_s`: how long a worker that does not renew its lease counts as alive.
"""

_CHECKED_ELSEWHERE = (
    *("capsule_streams", "capsule_redis_url", "capsule_prefix", "capsule_output"),
    *("capsule_retention", "capsule_publish", "capsule_lease_s"),
)
_KNOWN = (*DEFAULTS, "capsule_revoke_ttl_s", "capsule_store")
_STARTS = ("fork", "exec", "cold")


def setting(app: Any, name: str) -> Any:
    """One of our settings, checked."""
    value = app.conf.get(name, _default(app, name))
    if name == "capsule_start":
        if value not in _STARTS:
            raise InvalidSetting(name, value, "one of " + ", ".join(map(repr, _STARTS)))
        return value
    if name in _CHECKED_ELSEWHERE:
        return value
    least = 1 if name.endswith(("_children", "_limit")) else 0.001
    is_number = isinstance(value, int if least == 1 else (int, float))
    if not is_number or isinstance(value, bool) or value < least:
        raise InvalidSetting(name, value, f"a number from {least}")
    return value


def _default(app: Any, name: str) -> Any:
    """Who has Celery's own pool not fork (`worker_pool_start_method`) has a reason for it."""
    if name == "capsule_start" and app.conf.get("worker_pool_start_method", "fork") != "fork":
        return "exec"
    return DEFAULTS[name]


def check(app: Any) -> None:
    """InvalidSetting for the first of our settings that is wrong, before anything is started.

    A name that nobody knows is told: it may be another version's.
    """
    for name in DEFAULTS:
        setting(app, name)
    checked_revoke_ttl_s(app)
    for name in app.conf:
        if name.startswith("capsule_") and name not in _KNOWN:
            close = get_close_matches(name, _KNOWN, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            log.warning("there is no setting %s%s", name, hint)


def profile(app: Any, lane: TaskChildSettings, options: dict[str, Any]) -> Profile:
    """How children of one kind are started, and when replaced."""
    most_kib = options.get("max_memory_per_child")
    start = setting(app, "capsule_start")
    return Profile.app(
        session=SessionConfig(
            child=ChildSettings(
                tasks=lane,
                # A loop that is blocked takes none of what it is sent: all of it waits there.
                executor=ExecutorSettings(max_waiting=max(_WAITING, lane.async_limit)),
                output=OutputSettings(
                    backpressure=setting(app, "capsule_output"), lines_at_once=True
                ),
            ),
            timeouts=TimeoutSettings(
                ready_s=setting(app, "capsule_ready_s"),
                shutdown_s=setting(app, "capsule_child_stop_s"),
            ),
            # What a child says beside its tasks the pool hears as it comes, and keeps none of it.
            routing=RoutingSettings(log_output=False, session_queue=1, session_queue_bytes=KIB),
            replace_killed=False,
        ),
        pool=PoolSettings(
            min_idle=0,  # the dispatcher says how many there are
            fresh=False,
            max_uses=options.get("maxtasksperchild") or None,
            max_rss_bytes=int(most_kib * KIB) if most_kib else None,
        ),
        start="cold" if start == "cold" else "fork",
        imports=(
            "capsule_tasks.child.executors.celery_app",
            *([lane.app.partition(":")[0]] if lane.app else []),
        ),
        stop_mode="graceful",
    )


def loss_counter_of(app: Any) -> LossCounter:
    """The count of processes that each message has cost."""
    return LossCounter(
        setting(app, "capsule_loss_limit"), redis_url(app), retention_settings(app).prefix
    )
