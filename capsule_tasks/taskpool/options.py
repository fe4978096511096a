"""The pool's settings, from the Celery app's configuration and from its worker's options."""

from __future__ import annotations

import logging
from difflib import get_close_matches
from typing import Any

from capsule_tasks.client.configuration import retention_settings, setting, settings_of
from capsule_tasks.client.redis_location import STORE_SETTING, redis_url
from capsule_tasks.executions.publishing.loss_counter import LossCounter
from capsule_tasks.settings import (
    KIB,
    AppSettings,
    ChildSettings,
    ExecutorSettings,
    OutputSettings,
    PoolSettings,
    Profile,
    PublishSettings,
    RoutingSettings,
    SessionConfig,
    TaskChildSettings,
    TimeoutSettings,
)

log = logging.getLogger("capsule_tasks.taskpool")

_WAITING = ExecutorSettings().max_waiting

_KNOWN = [f"capsule_{name}" for name in AppSettings.__struct_fields__]


def check(app: Any) -> None:
    """Raise InvalidSetting for a wrong `capsule_…` setting, before anything is started.

    An unknown name is only logged: another version of this package may know it.
    """
    for name in _KNOWN:
        setting(app, name)
    retention_settings(app)
    settings_of(PublishSettings, app, "capsule_publish")
    for name in app.conf:
        if name.startswith("capsule_") and name not in (*_KNOWN, STORE_SETTING):
            close = get_close_matches(name, _KNOWN, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            log.warning("there is no setting %s%s", name, hint)


def profile(app: Any, lane: TaskChildSettings, options: dict[str, Any]) -> Profile:
    """How children of one kind are started, and when replaced."""
    max_kib = options.get("max_memory_per_child")
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
            # The pool handles messages of no task as they come, so none are queued.
            routing=RoutingSettings(log_output=False, session_queue=1, session_queue_bytes=KIB),
            replace_killed=False,
        ),
        pool=PoolSettings(
            min_idle=0,  # the dispatcher sets the number
            fresh=False,
            max_uses=options.get("maxtasksperchild") or None,
            max_rss_bytes=int(max_kib * KIB) if max_kib else None,
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
