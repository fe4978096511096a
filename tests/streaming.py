"""The publisher of a worker without the worker: executions whose children are the test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from capsule_tasks.executions.ends import End
from capsule_tasks.executions.execution import Execution
from capsule_tasks.executions.lifecycle import Lifecycle
from capsule_tasks.executions.origin import Origin
from capsule_tasks.executions.publishing.loss_counter import LossCounter
from capsule_tasks.executions.publishing.publisher import Publisher
from capsule_tasks.executions.states import Claim, Run
from capsule_tasks.executions.supervisor import Supervisor
from capsule_tasks.protocol.messages import TaskCall, TaskResult
from capsule_tasks.sessions import SessionPool
from capsule_tasks.settings import ExecutionSettings, LeaseSettings, Profile, PublishSettings
from capsule_tasks.storage.executions.store import ExecutionStore
from tests.servers import fresh_prefix

HANG_S = 30
PID = 17


class Dispatcher:
    """Records what is done to executions; the children are silent."""

    def __init__(self) -> None:
        self.queued: list[str] = []
        self.done: list[str] = []

    def enqueue(self, execution: Execution) -> None:
        self.queued.append(execution.call.task_id)

    def remove(self, execution: Execution) -> None:
        self.done.append(f"remove {execution.call.task_id}")

    def cancel(self, execution: Execution, _grace_s: float) -> None:
        self.done.append(f"cancel {execution.call.task_id}")

    async def end_input(self, _execution: Execution, request_id: str) -> None:
        self.done.append(f"end input {request_id}")

    async def interrupt(self, execution: Execution) -> None:
        self.done.append(f"interrupt {execution.call.task_id}")

    async def stop(self) -> None: ...


class Reporter:
    """Records what would be reported to Celery."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.is_acknowledged = asyncio.Event()
        self.has_ended = asyncio.Event()

    def accepted(self, pid: int, at: float, *, defers_ack: bool) -> None:
        self.heard.append("accepted")

    def acknowledge(self) -> None:
        self.heard.append("acknowledge")
        self.is_acknowledged.set()

    def soft_limit(self) -> None:
        self.heard.append("soft limit")

    def free_slot(self) -> None:
        self.heard.append("free slot")

    def ended(self, end: End, *, frees_slot: bool) -> None:
        self.heard.append("ended")
        self.has_ended.set()

    def task_frames(self, stack: str) -> str:
        return stack


class OutputLog:
    def write(self, _source: Execution, _output: object) -> None: ...

    def forget(self, _source: Execution) -> None: ...


class Ground:
    """A supervisor with a publisher in one Redis, and a reader of what is stored."""

    def __init__(
        self, url: str, *, may_drop: bool = True, lease_s: float = 15.0, **settings: Any
    ) -> None:
        self.retention = ExecutionSettings(prefix=fresh_prefix())
        self.task_retention: Any = {}
        """The settings that the task of every execution has of its own."""
        self.publisher = Publisher(
            url,
            worker="w",
            settings=PublishSettings(**settings),
            retention=self.retention,
            lease=LeaseSettings(lease_s=lease_s),
            may_drop=may_drop,
            ended_elsewhere=lambda _: None,
            fail_result=lambda *_: None,
            task_retention=lambda _: self.task_retention,
        )
        self.supervisor = Supervisor(
            SessionPool({"blocking": Profile(), "async": Profile()}),
            async_limit=10,
            publisher=self.publisher,
            losses=LossCounter(5),
            output_log=OutputLog(),
        )
        self.dispatcher = Dispatcher()
        self.supervisor.dispatcher = self.dispatcher  # type: ignore[assignment]

    @property
    def store(self) -> ExecutionStore:
        return self.publisher.store

    async def start(self) -> None:
        await self.supervisor.start()

    async def stop(self) -> None:
        await self.supervisor.stop()

    def admitted(self, execution: Execution) -> Execution:
        self.supervisor.admit(execution)
        return execution

    def begin(self, execution: Execution) -> None:
        """A child is sent the execution, and starts it."""
        execution.pid = PID
        self.supervisor.feed(execution, Lifecycle.on_sent)
        self.supervisor.feed(execution, Lifecycle.on_child_started, 0.0)

    async def running(self, task_id: str, **origin: Any) -> Execution:
        """An execution that has begun and is claimed, and not over."""
        execution = self.admitted(new_execution(task_id, **origin))
        await eventually(lambda: has_started(execution))
        self.begin(execution)
        await eventually(lambda: is_held(execution))
        return execution

    def finish(self, execution: Execution) -> None:
        """The child has traced the task to its end."""
        terminal = TaskResult(execution_id=execution.call.task_id, text="'done'", runtime_s=0.1)
        self.supervisor.finished(execution, terminal, None)

    async def end(self, execution: Execution) -> None:
        """The task has succeeded, and that was reported to Celery."""
        if not execution.life.is_with_child:
            self.begin(execution)
        self.finish(execution)
        await reporter_of(execution).has_ended.wait()


def reporter_of(execution: Execution) -> Reporter:
    reporter = execution.reporter
    assert isinstance(reporter, Reporter)
    return reporter


def has_started(execution: Execution) -> bool:
    """Whether the execution waits for a child only, or has come to one."""
    return execution.life.run in (Run.QUEUED, Run.SENT, Run.RUNNING, Run.LOST)


def is_held(execution: Execution) -> bool:
    """Whether its attempt is claimed, and not over."""
    return execution.life.claim is Claim.CLAIMED


async def eventually(condition: Callable[[], object]) -> None:
    """Poll for what gives no signal."""
    async with asyncio.timeout(HANG_S):
        while not condition():
            await asyncio.sleep(0.002)


def new_execution(task_id: str, *, group: tuple[str, int] = ("", -1), **origin: Any) -> Execution:
    call = TaskCall(name="t", task_id=task_id, body=b"")
    where = Origin(execution_id=task_id, task="t", group=group[0], index=group[1], **origin)
    return Execution(call, Lifecycle(where), Reporter())
