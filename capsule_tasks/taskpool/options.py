"""Settings of the pool's parts, from the Celery app's configuration and the worker's options."""

from __future__ import annotations

import logging
import sys
from difflib import get_close_matches
from typing import Any

import msgspec
from billiard.exceptions import WorkerLostError

from capsule_tasks.client.configuration import (
    code_profiles,
    named_session_settings,
    retention_settings,
    setting,
    settings_of,
    tenant_settings,
)
from capsule_tasks.client.redis_location import STORE_SETTING, redis_url
from capsule_tasks.client.watching.results import stored_end
from capsule_tasks.executions.publishing.loss_counter import LossCounter
from capsule_tasks.executions.publishing.publisher import Publisher
from capsule_tasks.settings import (
    KIB,
    AppSettings,
    ChildSettings,
    ExecutorSettings,
    LeaseSettings,
    OutputSettings,
    PoolSettings,
    Profile,
    PublishSettings,
    RoutingSettings,
    SessionConfig,
    TaskChildSettings,
    TimeoutSettings,
)
from capsule_tasks.storage.sessions.blobs import check_place

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
    code_profiles(app)
    tenant_settings(app)
    settings_of(PublishSettings, app, "capsule_publish")
    check_place("capsule_checkpoints", setting(app, "capsule_checkpoints"))
    for name in app.conf:
        if name.startswith("capsule_") and name not in (*_KNOWN, STORE_SETTING):
            close = get_close_matches(name, _KNOWN, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            log.warning("there is no setting %s%s", name, hint)


def lane_settings(app: Any, hostname: str, **changes: Any) -> TaskChildSettings:
    """The settings that a child of this worker is sent."""
    made = _made_in_code(app)
    conf = {name: value for name, value in made.items() if _is_sendable(value)}
    return TaskChildSettings(
        hostname=hostname,
        app=_path_of(app),
        conf=conf,
        unsendable=tuple(sorted(made.keys() - conf.keys())),
        tasks=tuple(sorted(app.tasks)),
        **changes,
    )


def _made_in_code(app: Any) -> dict[str, Any]:
    """Settings that were assigned or added as defaults: who imports the app may have others."""
    found: dict[str, Any] = {}
    for settings in reversed(app.conf.maps[:-2]):  # the last are the configuration, and Celery's
        found.update(settings)
    found.pop("deprecated_settings", None)  # of Celery itself
    return found


def _is_sendable(value: Any) -> bool:
    """Whether the child would have the same; lists for tuples, which Celery takes as well."""
    try:
        decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(value))
        return bool(decoded == (list(value) if isinstance(value, tuple) else value))
    except Exception:  # noqa: BLE001 - comparing runs code of anybody's
        return False


def _path_of(app: Any) -> str:
    """`module:attribute` under which a fresh interpreter finds the app; empty if nowhere."""
    candidates = [name for name in (app.main, getattr(app, "__module__", None)) if name]
    modules = [sys.modules.get(name) for name in candidates] + list(sys.modules.values())
    for module in modules:
        name = getattr(module, "__name__", None)
        if module is None or name is None or name == "__main__" or name.startswith("celery."):
            continue
        for attribute, value in list(vars(module).items()):
            if value is app:
                return f"{name}:{attribute}"
    return ""


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


def make_publisher(app: Any, worker: str) -> Publisher | None:
    """None where streams are switched off, or there is no Redis to put them in."""
    if not setting(app, "capsule_streams"):
        return None
    url = redis_url(app)
    if url is None:
        log.warning("tasks have no streams: set capsule_redis_url to the Redis they should be in")
        return None

    def fail_result(execution_id: str, reason: str) -> None:
        try:
            app.backend.mark_as_failure(execution_id, WorkerLostError(reason))
        except Exception:
            log.exception("the result of lost task %s cannot be stored", execution_id)

    return Publisher(
        url,
        worker=worker,
        settings=settings_of(PublishSettings, app, "capsule_publish"),
        retention=retention_settings(app),
        sessions=named_session_settings(app),
        lease=LeaseSettings(lease_s=setting(app, "capsule_lease_s")),
        may_drop=setting(app, "capsule_output") == "drop_oldest",
        ended_elsewhere=lambda execution_id: stored_end(app, execution_id)[0],
        fail_result=fail_result,
        task_retention=lambda name: getattr(app.tasks.get(name), "capsule_retention", None),
    )
