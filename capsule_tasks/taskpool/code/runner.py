"""Finds the lane of code that a task message brings."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from kombu.serialization import loads, prepare_accept_content

from capsule_tasks.child.executors.tasks import decode_call
from capsule_tasks.client.code import CODE_TASK, CodeArguments, arguments_of
from capsule_tasks.client.configuration import code_profiles, setting
from capsule_tasks.errors import reason_of
from capsule_tasks.executions.calls import CodeCall
from capsule_tasks.executions.execution import Execution
from capsule_tasks.executions.lanes import Lane, RefusingLane
from capsule_tasks.executions.supervisor import Supervisor
from capsule_tasks.protocol.messages import TaskCall
from capsule_tasks.sessions.pool.session_pool import ProfilePool
from capsule_tasks.settings import (
    KIB,
    ChildSettings,
    DiagnosticSettings,
    OutputSettings,
    RoutingSettings,
    SessionConfig,
    TimeoutSettings,
)
from capsule_tasks.taskpool.code.lanes import CodeEnds, CodeLane
from capsule_tasks.taskpool.code.session_calls import SessionCalls
from capsule_tasks.taskpool.code.tracing import CodeTracer

_HEARTBEAT_S = 5.0

log = logging.getLogger("capsule_tasks.taskpool")


class CodeRunner:
    """One lane for each profile of code; the first code of a profile starts its sessions."""

    def __init__(self, app: Any, hostname: str, supervisor: Supervisor) -> None:
        self._app = app
        self._hostname = hostname
        self._supervisor = supervisor
        self._tracer = CodeTracer(app, hostname)
        self._ends = CodeEnds(self._tracer, supervisor)
        self.session_calls = SessionCalls(app, self._tracer)
        base = session_config(app)
        self.lanes = {
            name: CodeLane(
                name,
                ProfilePool(f"code:{name}", settings.profile(base), None, None),
                settings.warm,
                self._ends,
                supervisor,
                supervisor.dispatcher.sent,
            )
            for name, settings in code_profiles(app).items()
        }
        supervisor.dispatcher.lanes.update({lane.kind: lane for lane in self.lanes.values()})

    async def stop(self) -> None:
        """End all sessions; what is being traced is stored all the same."""
        await self.session_calls.stop()
        self._tracer.threads.shutdown(wait=False, cancel_futures=True)
        for lane in self.lanes.values():
            await lane.stop()

    def place(self, execution: Execution) -> None:
        """Make the code of a task message the call of its execution. Called on the hub thread."""
        message = execution.call
        assert isinstance(message, TaskCall)
        try:
            code = self._arguments(message)
        except Exception as error:  # noqa: BLE001 - Celery's tracer meets it again, and reports it
            code, lane = CodeArguments("", "", None), self._refusal(reason_of(error))
        else:
            lane = self.lanes.get(code.profile) or self._refusal(self._unknown(code.profile))
        execution.lane = lane
        execution.call = CodeCall(
            name=CODE_TASK,
            task_id=message.task_id,
            source=code.source,
            timeout_s=code.timeout_s,
            message=message,
        )

    def _arguments(self, message: TaskCall) -> CodeArguments:
        accept = prepare_accept_content(self._app.conf.accept_content)
        args, kwargs, _ = decode_call(message, loads, accept)
        return arguments_of(*args, **kwargs)

    def _unknown(self, profile: str) -> str:
        known = ", ".join(map(repr, self.lanes)) or "none"
        return (
            f"there is no profile {profile!r} of code in worker {self._hostname}; "
            f"capsule_code_profiles has {known}"
        )

    def _refusal(self, reason: str) -> Lane:
        return RefusingLane(self._supervisor, partial(self._ends.refuse, reason=reason))


def session_config(app: Any) -> SessionConfig:
    """The configuration that sessions of all profiles of code have in common."""
    return SessionConfig(
        child=ChildSettings(
            output=OutputSettings(backpressure=setting(app, "capsule_output"), lines_at_once=True),
            # Heartbeats are most of what the many idle sessions of a worker cost.
            diagnostics=DiagnosticSettings(heartbeat_interval_s=_HEARTBEAT_S),
        ),
        timeouts=TimeoutSettings(
            unresponsive_s=5 * _HEARTBEAT_S,
            ready_s=setting(app, "capsule_ready_s"),
            shutdown_s=setting(app, "capsule_child_stop_s"),
        ),
        # Output of no execution is of code that has ended: it is nobody's.
        routing=RoutingSettings(log_output=False, session_queue=1, session_queue_bytes=KIB),
        replace_killed=False,
    )
