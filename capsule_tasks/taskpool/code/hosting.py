"""The host of named sessions in a worker: its profiles, and how it stores results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from billiard.exceptions import WorkerLostError

from capsule_tasks.client.configuration import code_profiles, setting, tenant_settings
from capsule_tasks.client.watching.results import stored_end
from capsule_tasks.errors import CodeFailed
from capsule_tasks.executions.ends import EndKind
from capsule_tasks.executions.hosting.child import HostedProfile
from capsule_tasks.executions.hosting.host import SessionHost
from capsule_tasks.executions.hosting.outcomes import CallOutcome
from capsule_tasks.executions.hosting.plan import HostLimits
from capsule_tasks.executions.publishing.publisher import Publisher
from capsule_tasks.executions.supervisor import Supervisor
from capsule_tasks.protocol.events import Outcome
from capsule_tasks.settings import CodeProfileSettings
from capsule_tasks.storage.sessions.blobs import checkpoint_store
from capsule_tasks.taskpool.code.lanes import CodeLane
from capsule_tasks.taskpool.code.runner import session_config
from capsule_tasks.taskpool.code.tracing import storable


def make_host(
    app: Any,
    publisher: Publisher | None,
    supervisor: Supervisor,
    lanes: Mapping[str, CodeLane],
) -> SessionHost | None:
    """None without streams, and if no profile allows named sessions in this worker.

    Named sessions are forked from the templates of the lanes.
    """
    profiles = [
        _hosted(app, name, settings, lanes[name])
        for name, settings in code_profiles(app).items()
        if settings.max_live > 0
    ]
    if publisher is None or not profiles:
        return None
    checkpoints = checkpoint_store(
        publisher.connection,
        setting(app, "capsule_checkpoints"),
        settings=publisher.sessions.settings,
    )
    return SessionHost(
        profiles,
        publisher=publisher,
        supervisor=supervisor,
        checkpoints=checkpoints,
        tenants=tenant_settings(app),
        store_result=CallResults(app).store,
        stored_end=lambda call_id: stored_end(app, call_id)[0],
        max_live=setting(app, "capsule_max_live_sessions"),
    )


def _hosted(app: Any, name: str, settings: CodeProfileSettings, lane: CodeLane) -> HostedProfile:
    return HostedProfile(
        name=name,
        limits=HostLimits(
            max_live=settings.max_live,
            idle_timeout_s=settings.idle_timeout_s,
            max_age_s=settings.max_age_s,
            checkpoint_every=settings.checkpoint_every,
            checkpoint_idle_s=settings.checkpoint_idle_s,
        ),
        config=settings.profile(session_config(app)).session,
        spawner=lane.pool.spawner,
        max_checkpoint_bytes=settings.max_checkpoint_bytes,
    )


class CallResults:
    """Stores the outcomes of calls in the app's result backend; called on threads."""

    def __init__(self, app: Any) -> None:
        self._app = app

    def store(self, call_id: str, outcome: CallOutcome) -> None:
        """Store an outcome under the id of its call."""
        backend = self._app.backend
        if outcome.outcome is Outcome.SUCCEEDED:
            backend.mark_as_done(call_id, storable(self._app, outcome.value))
        elif outcome.outcome is Outcome.CANCELLED:
            backend.mark_as_revoked(call_id, outcome.message)
        elif outcome.type == EndKind.LOST.value:
            backend.mark_as_failure(call_id, WorkerLostError(outcome.message))
        else:
            error = CodeFailed(outcome.type, outcome.message, outcome.traceback, outcome.kind)
            backend.mark_as_failure(call_id, error, traceback=outcome.traceback or None)
