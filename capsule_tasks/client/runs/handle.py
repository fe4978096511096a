"""`RunHandle`: a durable run, from any process."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Iterator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from capsule_tasks.client.cancelling import cancel_all, check_type, requester
from capsule_tasks.client.execution import Execution
from capsule_tasks.client.runs.info import RunInfo, output_of
from capsule_tasks.client.runs.messages import RUN_TASK, cancel_run, send_stored
from capsule_tasks.client.sessions.named_session import check_id
from capsule_tasks.client.watching.watch_thread import blocking, watch_thread
from capsule_tasks.durable import settle
from capsule_tasks.errors import DecisionExpired, InvalidSetting, RunEnded, UnknownCall
from capsule_tasks.settings import check_value
from capsule_tasks.storage import RunStore
from capsule_tasks.storage.executions.types import Event
from capsule_tasks.storage.runs.types import OptionalName, Resolved, Status


class RunHandle:
    """A durable run, by its id. Making one asks nothing of Redis.

    Each blocking method has an asyncio form whose name begins with `a`. Each raises RunNotFound for
    a run that is not stored. A run of a canvas is stored once a worker was given its task.
    """

    def __init__(self, app: Any, run_id: str) -> None:
        check_id("run_id", run_id)
        self.app = app
        self.id = run_id

    def __repr__(self) -> str:
        return f"<RunHandle {self.id!r}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunHandle) and (self.app, self.id) == (other.app, other.id)

    def __hash__(self) -> int:
        return hash(self.id)

    @property
    def execution(self) -> Execution:
        """The run as an execution, whose id is that of the run: Celery's result, output, events."""
        return Execution(self.id, app=self.app, task_name=RUN_TASK)

    # --- watching -------------------------------------------------------------------------------

    async def aevents(self, after: str | None = None) -> AsyncGenerator[Event, None]:
        """Every event after the id `after`, each once and in order; the last one is `Ended`.

        Events of a run are `RunEvent`s. After a crash, those of the turn that was cut come again.
        A run that waits for a person has no events until it goes on.
        """
        await (await self._store()).read(self.id, with_snapshot=False)
        async with aclosing(self.execution.aevents(after)) as events:
            async for event in events:
                yield event

    def events(self, after: str | None = None) -> Iterator[Event]:
        """The blocking form of `aevents`."""
        return watch_thread.iterate(lambda: self.aevents(after))

    async def astate(self) -> RunInfo:
        """The state of the run now, with the calls that it waits for."""
        return RunInfo.of(await (await self._store()).read(self.id, with_snapshot=False))

    state = blocking(astate)

    async def aresult(self, timeout_s: float | None = None) -> Any:
        """Wait for the end of the run; its output, as JSON has it.

        Raises RunFailed or RunCancelled, and RunTimeout for a run that goes on, or still waits for
        a person, after `timeout_s`. Needs no result backend.
        """
        store = await self._store()
        return output_of(await store.wait(self.id, timeout_s=timeout_s))

    result = blocking(aresult)

    # --- decisions ------------------------------------------------------------------------------

    async def aapprove(
        self,
        call_id: str,
        *,
        always: bool = False,
        by: str | None = None,
        roles: Sequence[str] = (),
    ) -> Status:
        """Approve a call that waits; with `always` also every later call of its tool by its agent.

        The first decision counts: another one raises AlreadyDecided, which has the first. The
        status after it: `queued` if the run goes on, `interrupted` if it waits for other calls.
        `by`, by default this user and host, or one of `roles` has to be among those who may decide,
        else MayNotDecide is raised. Raises DecisionExpired after the time limit, UnknownCall if the
        call does not wait, RunEnded if the run has ended.
        """
        check_id("call_id", call_id)
        approvals = (await self._store()).approvals
        decision = approvals.approve(
            self.id, call_id, always=always, by=_person(by), roles=tuple(roles)
        )
        return await self._decided(call_id, decision)

    approve = blocking(aapprove)

    async def areject(
        self,
        call_id: str,
        *,
        message: str | None = None,
        always: bool = False,
        by: str | None = None,
        roles: Sequence[str] = (),
    ) -> Status:
        """Reject a call that waits, with a message for the model; see `approve`."""
        check_id("call_id", call_id)
        approvals = (await self._store()).approvals
        decision = approvals.reject(
            self.id, call_id, message=message, always=always, by=_person(by), roles=tuple(roles)
        )
        return await self._decided(call_id, decision)

    reject = blocking(areject)

    async def asettle(
        self,
        call_id: str,
        *,
        made: bool,
        output: Any = None,
        by: str | None = None,
        roles: Sequence[str] = (),
    ) -> Status:
        """Say of an uncertain call whether it was made, and then what its output was, as JSON.

        A call that was not made is made by the run. As with an approval, the first answer counts.
        """
        check_id("call_id", call_id)
        check_type("made", made, bool)
        if output is not None and not made:
            raise InvalidSetting("output", output, "left out for a call that was not made")
        try:
            msgspec.json.encode(output)
        except (TypeError, ValueError) as fault:
            raise InvalidSetting("output", output, f"what JSON can write: {fault}") from fault
        store = await self._store()
        answer = settle(
            store, self.id, call_id, made=made, output=output, by=_person(by), roles=tuple(roles)
        )
        return await self._decided(call_id, answer)

    settle = blocking(asettle)

    async def _decided(self, call_id: str, decision: Awaitable[Resolved]) -> Status:
        """Take a decision, and send the run on if it has to be."""
        try:
            resolved = await decision
        except DecisionExpired as expired:
            if expired.resume:
                await send_stored(self.app, await self._store(), self.id, expired.updated_us)
            raise
        except UnknownCall:
            state = await self.astate()
            if state.is_ended:
                raise RunEnded(self.id, state.status) from None
            if any((each.call_id, each.kind) == (call_id, "settle") for each in state.waiting):
                about = "it was started, and may have been made: settle it"
                raise UnknownCall(call_id, about) from None
            raise
        if resolved.resume:
            await send_stored(self.app, await self._store(), self.id, resolved.updated_us)
        return resolved.status

    # --- cancelling -----------------------------------------------------------------------------

    async def acancel(self, *, by: str | None = None) -> Status:
        """Cancel the run; what its completed turns have stored stays in the history.

        A run without an owner is `cancelled` at once. One that is `running` is stopped by its
        worker: its tools are cancelled, and it ends in milliseconds. Safe to repeat; raises
        RunEnded for a run that has completed or failed.
        """
        status: Status = await cancel_run(self.app, await self._store(), self.id, _person(by))
        if status == "running":
            await cancel_all(self.app, [self.id], None)
        return status

    cancel = blocking(acancel)

    async def _store(self) -> RunStore:
        return (await watch_thread.watcher(self.app)).runs


def _person(by: str | None) -> str:
    """The name under which something is recorded; this user and host if none is given."""
    check_value("by", by, OptionalName)
    return by if by is not None else requester()
