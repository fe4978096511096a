"""`Execution`: what `.delay()` returns, also made from an id."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from typing import Any, Self

from celery.result import AsyncResult, EagerResult

from capsule_tasks.client.cancelling import CancelAnswer, check_grace, check_type
from capsule_tasks.client.revokes import store_revokes
from capsule_tasks.client.watching.results import end_from_meta
from capsule_tasks.client.watching.streaming import Snapshot, Streaming, check_limit
from capsule_tasks.errors import InvalidId
from capsule_tasks.protocol.events import Command, Ended
from capsule_tasks.storage.executions.types import Event


class Execution(Streaming, AsyncResult):
    """An `AsyncResult` of a task that runs in a session. The task id is the execution id.

    Watching has no side effects: any number of watchers may watch one execution, from any process,
    at any time. Each blocking method has an asyncio form whose name begins with `a`.
    """

    def __init__(self, execution_id: str, *args: Any, **options: Any) -> None:
        check_type("execution_id", execution_id, str)
        if not execution_id:
            raise InvalidId("execution id", execution_id, "must not be empty")
        super().__init__(execution_id, *args, **options)

    @classmethod
    def of(cls, result: AsyncResult) -> Self:
        """The execution of a Celery result."""
        made = cls(result.id, app=result.app)
        made.ignored = result.ignored
        return made

    def revoke(self, *args: Any, **options: Any) -> None:
        """Revoke as Celery does, and store the revoke for workers that are not running now."""
        store_revokes(self.app, self.id)
        super().revoke(*args, **options)


class EagerExecution(EagerResult, Execution):
    """The execution of a task that ran in its caller (`task_always_eager`). Needs no Redis."""

    @classmethod
    def of(cls, result: Any) -> EagerExecution:
        made = cls.__new__(cls)
        made.__dict__.update(vars(result))
        return made

    def events(self, after: str | None = None) -> Iterator[Event]:
        """The one event, its end. Its output went to the streams of the caller."""
        ended = self._ended()
        if after is None and ended is not None:
            yield Event(id="0-1", at=0.0, message=ended)

    async def aevents(self, after: str | None = None) -> AsyncGenerator[Event, None]:
        for event in self.events(after):
            yield event

    async def atail(self, limit: int = 100) -> list[Event]:
        check_limit(limit)
        return list(self.events())[:limit]

    async def asnapshot(self) -> Snapshot:
        ended = self._ended()
        return Snapshot(
            execution_id=self.id,
            state="ended",
            outcome=str(ended.outcome) if ended is not None else "",
            task=self.name or "",
            worker="",
            attempt=0,
            begun_at=None,
            ended_at=None,
        )

    async def aget(self, timeout_s: float | None = None) -> Any:
        return self.get(timeout=timeout_s)

    async def acancel(self, grace_s: float | None = None) -> CancelAnswer:
        check_grace(grace_s)
        return "over"

    async def _send_command(self, command: Command) -> CancelAnswer:  # noqa: ARG002  as an Execution's
        """An eager task has ended before anybody can send a command."""
        return "over"

    def _ended(self) -> Ended | None:
        return end_from_meta(
            {"status": self.state, "result": self.result, "traceback": self.traceback}
        )
