"""The streams of a worker without the worker: jobs whose task is the test, and no children."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from capsule_tasks.protocol.events import Ended, Outcome
from capsule_tasks.settings import ExecutionSettings, LeaseSettings, PublishSettings
from capsule_tasks.storage.executions import ExecutionStore
from capsule_tasks.taskpool.endings import Ending
from capsule_tasks.taskpool.jobs import Job
from capsule_tasks.taskpool.streams.publication import Publication
from capsule_tasks.taskpool.streams.worker import Streams
from tests.servers import fresh_prefix

HANG_S = 30
SUCCEEDED = Ending(Ended(outcome=Outcome.SUCCEEDED))


class Session:
    """Notes what is done to it."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def read_on(self, _execution_id: str) -> None:
        self.done.append("read on")

    async def interrupt(self, _execution_id: str) -> None:
        self.done.append("interrupted")


class Crew:
    """Notes what becomes of jobs."""

    def __init__(self) -> None:
        self.submitted: list[Job] = []
        self.cancelled: list[Job] = []
        self.session = Session()

    def submit(self, job: Job) -> None:
        self.submitted.append(job)

    def drop(self, _job: Job) -> None: ...

    def cancel(self, job: Job, _grace_s: float, _asker: str) -> None:
        self.cancelled.append(job)

    def end_input(self, _job: Job, _request_id: str) -> None: ...

    def session_of(self, _job: Job) -> Any:
        return self.session


class Ground:
    """Streams in one Redis, and who looks at what is there."""

    def __init__(self, url: str, *, drops: bool = True, lease_s: float = 15.0, **settings: Any):
        self.crew = Crew()
        self.kept = ExecutionSettings(prefix=fresh_prefix())
        self.own_kept: Any = {}
        """What the task of every job has settings of its own for."""
        self.streams = Streams(
            url,
            self.crew,
            worker="w",
            settings=PublishSettings(**settings),
            kept=self.kept,
            lease=LeaseSettings(lease_s=lease_s),
            drops=drops,
            ended_elsewhere=lambda _: None,
            fail_result=lambda *_: None,
            own_kept=lambda _: self.own_kept,
        )

    @property
    def store(self) -> ExecutionStore:
        return self.streams.store

    def admitted(self, job: Job) -> Publication:
        self.streams.admit(job)
        publication: Publication = job.publication
        return publication

    async def running(self, task_id: str) -> Publication:
        """One that has begun and is claimed, and not over."""
        publication = self.admitted(new_job(task_id))
        await eventually(lambda: publication.has_begun)
        publication.accepted(1, None)
        publication.on_due()
        await eventually(lambda: publication.is_live)
        return publication

    async def end(self, publication: Publication) -> None:
        """Its job has succeeded, and Celery has heard of it."""
        told = asyncio.Event()
        publication.end(SUCCEEDED, told.set)
        await told.wait()


async def eventually(condition: Callable[[], object]) -> None:
    """Wait for what nobody announces."""
    async with asyncio.timeout(HANG_S):
        while not condition():
            await asyncio.sleep(0.002)


def new_job(task_id: str, *, group: tuple[str, int] = ("", -1), **task: Any) -> Job:
    """A job of a task with these attributes."""
    request = SimpleNamespace(task=SimpleNamespace(**task))
    return Job.never_called("t", task_id, request=request, group=group)
