"""What executions are told: each order heard once, in turn, and done."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

from capsule_tasks.errors import CapsuleError, StorageError, UnknownInputRequest
from capsule_tasks.protocol.events import (
    CancelCommand,
    InterruptCommand,
    RespondCommand,
    StackCommand,
    Stacks,
    decode_command,
)
from capsule_tasks.storage.execution_types import Told
from capsule_tasks.storage.executions import ExecutionStore
from capsule_tasks.taskpool.frames import only_task_frames
from capsule_tasks.taskpool.jobs import Job
from capsule_tasks.taskpool.streams.background import AGAIN_S, Background

if TYPE_CHECKING:
    from capsule_tasks.taskpool.streams.publication import Publication

log = logging.getLogger("capsule_tasks.taskpool")

_MOST_ASKER = 200


class Crew(Protocol):
    """What is done to jobs."""

    def submit(self, job: Job) -> None: ...
    def drop(self, job: Job) -> None: ...
    def cancel(self, job: Job, grace_s: float, asker: str) -> None: ...
    def end_input(self, job: Job, request_id: str) -> None: ...
    def session_of(self, job: Job) -> Any: ...


class Orders:
    """Has the crew do what executions are told."""

    def __init__(self, crew: Crew, background: Background, *, grace_s: float) -> None:
        self._crew = crew
        self._background = background
        self._grace_s = grace_s

    def cancel(self, job: Job, grace_s: float | None = None, asker: str = "") -> None:
        """End a job, whether it has begun or not."""
        # Whoever may write to the stream names the asker: quoted, it is one line and no other's.
        who = f"{asker[:_MOST_ASKER]!r} (Execution.cancel)" if asker else "Execution.cancel"
        self._crew.cancel(job, self._grace_s if grace_s is None else grace_s, who)

    def obey(self, publication: Publication, data: bytes) -> None:
        """Do what an execution was told. Before its beginning only a cancel means something."""
        command = decode_command(data)
        if isinstance(command, CancelCommand):
            self.cancel(publication.job, command.grace_s, command.asker)
        elif command is None:
            log.warning("task %s was told what is not understood", publication.execution_id)
        elif publication.has_begun and publication.is_live:
            self._background.spawn(self._obey(publication, command))

    async def _obey(self, publication: Publication, command: Any) -> None:
        job = publication.job
        session = self._crew.session_of(job)
        if session is None:
            return
        try:
            if isinstance(command, InterruptCommand):
                await session.interrupt(job.execution_id)
            elif isinstance(command, RespondCommand):
                await session.input_response(
                    command.text,
                    request_id=command.request_id or next(iter(publication.questions), ""),
                    execution_id=job.execution_id,
                    eof=command.eof,
                )
            elif isinstance(command, StackCommand):
                text = await session.stack(job.execution_id)
                text = text if command.all_frames else only_task_frames(text)
                publication.tell(Stacks(in_reply_to=command.request_id, text=text))
        except UnknownInputRequest as error:
            log.info("an answer came too late: %s", error)
        except CapsuleError as error:
            log.warning("task %s could not do as told: %s", publication.execution_id, error)


class Ear:
    """Reads what one execution is told when it is rung for, and hears every entry once."""

    __slots__ = (
        "_background",
        "_execution_id",
        "_hear",
        "_last",
        "_listening",
        "_store",
        "is_rung",
    )

    def __init__(
        self,
        execution_id: str,
        store: ExecutionStore,
        background: Background,
        hear: Callable[[bytes], object],
    ) -> None:
        self.is_rung = False
        """There may be something that was not read."""
        self._execution_id = execution_id
        self._store = store
        self._background = background
        self._hear = hear
        self._last = ""
        self._listening = False

    def hear(self, told: Iterable[Told]) -> None:
        """What came in answer to a claim, or was read."""
        for one in told:
            if _is_after(one.id, self._last):
                self._last = one.id
                self._hear(one.data)

    def listen(self, is_live: Callable[[], bool]) -> None:
        """Read for as long as it is rung for."""
        if not self._listening:
            self._listening = True
            self._background.spawn(self._listen(is_live))

    async def _listen(self, is_live: Callable[[], bool]) -> None:
        try:
            while self.is_rung and is_live():
                self.is_rung = False
                try:
                    self.hear(await self._store.told(self._execution_id, self._last))
                except StorageError as error:
                    self.is_rung = True
                    self._background.say_unavailable(error)
                    await asyncio.sleep(AGAIN_S)
        finally:
            self._listening = False


def _is_after(told_id: str, last: str) -> bool:
    """Whether an entry is later than the last one that was heard."""
    return not last or tuple(map(int, told_id.split("-"))) > tuple(map(int, last.split("-")))
