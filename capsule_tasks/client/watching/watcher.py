"""Watch executions on one event loop: thousands of them over two connections.

Redis is the truth. A doorbell wakes a watcher, and the watcher reads the events after the last one
it has seen. An execution without a stream is looked up in the result backend: when the backend's
own channel rings, if the backend is a Redis, and otherwise with growing pauses.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TypeVar

from capsule_tasks.errors import ExecutionEnded, StorageError
from capsule_tasks.protocol.events import Command, Ended, Outcome
from capsule_tasks.protocol.flow import utf8_size
from capsule_tasks.protocol.messages import Gap, Output
from capsule_tasks.settings import ExecutionSettings, NamedSessionSettings, RunSettings
from capsule_tasks.storage.connections.doorbells import Doorbells
from capsule_tasks.storage.connections.pipelined import PipelinedConnection
from capsule_tasks.storage.drivers import retry_while_unavailable
from capsule_tasks.storage.executions.store import ExecutionStore
from capsule_tasks.storage.executions.types import Event, Page, RecentEntry, State
from capsule_tasks.storage.operations import new_operation
from capsule_tasks.storage.runs.store import RunStore
from capsule_tasks.storage.sessions.blobs import IN_REDIS, checkpoint_store
from capsule_tasks.storage.sessions.checkpoints import CheckpointStore
from capsule_tasks.storage.sessions.store import NamedSessionStore

T = TypeVar("T")

_MIN_POLL_S = 0.5
_MAX_POLL_S = 15.0
_RETRY_DELAY_S = 0.5
MAX_OUTAGE_S = 60.0
_MAX_SEND_S = 15.0
"""A command waits for a failover, which takes seconds, but not as long as a watcher does."""
_GRACE_S = 0.25
"""The child stores the result of a task; the worker stores the last event a moment later."""
_CLAIM_S = 0.25
_BATCH_SIZE = 500
_CHECK_S = 2.0
_CHECKS_PER_S = 100
"""No doorbell rings for a stream that is flushed, evicted, or expires after its worker has died. So
a silent stream is read every two seconds, and less often if one process watches hundreds."""
_VANISHED_S = 3.0
"""How long a task whose stream has vanished has to store its result."""
_RESULT_BELL_S = 1.0
"""How long an unavailable result backend may delay the events of a stream."""

_EXPIRED = Ended(
    outcome=Outcome.LOST,
    type="StreamExpired",
    message="its stream is gone (expired, or lost with a Redis), and no result is known",
)

_OUTCOMES = frozenset(map(str, Outcome))

AskBackend = Callable[[str], tuple[Ended | None, bool]]
"""The end that the result backend has stored, and whether it was stored a moment ago."""
LookAfter = Callable[[], Awaitable[Ended | None]]
"""Sees to an execution that takes long; its end, if nothing else will ever tell it."""
FIRST_LOOK_S = 5.0
LOOK_AGAIN_S = 10.0
"""Between two looks after an execution; longer if one process watches thousands."""


class ExecutionWatcher:
    """Watches executions of one Redis on one event loop. Made on that loop; `close` ends it."""

    def __init__(
        self,
        url: str,
        settings: ExecutionSettings,
        backend_url: str | None,
        sessions: NamedSessionSettings | None = None,
        checkpoints: str = IN_REDIS,
        runs: RunSettings | None = None,
    ) -> None:
        self.connection = PipelinedConnection(url)
        self.store = ExecutionStore(self.connection, settings=settings)
        self.sessions = NamedSessionStore(self.connection, settings=sessions)
        self.runs = RunStore(self.connection, settings=runs)
        self._checkpoints = checkpoints
        self.bells = Doorbells(url, timeout_s=MAX_OUTAGE_S)
        self.watches = 0
        self.unhosted: set[str] = set()
        """Profiles of named sessions of which it was logged that no worker hosts them."""
        self.result_bells = self.bells
        if backend_url is not None and backend_url != url:
            self.result_bells = Doorbells(backend_url, timeout_s=_RESULT_BELL_S)

    @cached_property
    def checkpoints(self) -> CheckpointStore:
        """Made when it is needed: a producer that only watches need not have the extra `blobs`."""
        settings = self.sessions.settings
        return checkpoint_store(self.connection, self._checkpoints, settings=settings)

    async def close(self) -> None:
        await self.bells.close()
        if self.result_bells is not self.bells:
            await self.result_bells.close()
        await self.connection.close()

    @asynccontextmanager
    async def ringing(self, channel: str, ringing: asyncio.Event) -> AsyncGenerator[None, None]:
        """Set the event at each doorbell of the channel."""

        def ring(_message: bytes | None) -> None:
            ringing.set()

        try:
            await self.bells.listen(channel, ring)
            yield
        finally:
            self.bells.leave(channel, ring)

    async def send_command_to_all(self, ids: Sequence[str], command: Command) -> dict[str, State]:
        """Send a command to executions; the state of each after that.

        A task that started some milliseconds ago may not be claimed yet. The doorbell of the
        command has its worker claim it at once, so unclaimed executions get a short wait together.
        """
        channels = {one: self.store.keys_of(one).channel for one in ids}  # or InvalidId
        states = await _for_each(ids, lambda one: self.send_command(one, command))
        unclaimed = [one for one, state in states.items() if state in ("unknown", "waiting")]
        if not unclaimed:
            return states
        silent = set(unclaimed)
        all_rang = asyncio.Event()

        def ring(execution_id: str, _message: bytes | None) -> None:
            silent.discard(execution_id)
            if not silent:
                all_rang.set()

        rings = {one: partial(ring, one) for one in unclaimed}
        try:
            await _for_each(unclaimed, lambda one: self.bells.listen(channels[one], rings[one]))
            later_states = await self.states(unclaimed)
            silent -= {one for one, state in later_states.items() if state != states[one]}
            if silent:
                await wait_for_ring(all_rang, _CLAIM_S)
            rang = [one for one in unclaimed if one not in silent]
            return states | later_states | await self.states(rang)
        finally:
            for one in unclaimed:
                self.bells.leave(channels[one], rings[one])

    async def send_command(self, execution_id: str, command: Command) -> State:
        """Send a command to one execution, without a wait for its claim; its state after that."""
        command_id = new_operation()
        try:
            return await retry_while_unavailable(
                lambda: self.store.send_command(execution_id, command, command_id=command_id),
                _MAX_SEND_S,
            )
        except ExecutionEnded:
            return "ended"

    async def states(self, ids: Sequence[str]) -> dict[str, State]:
        """The state of each execution in Redis."""
        records = await _for_each(ids, self.store.read_record)
        return {one: record.state for one, record in records.items()}


async def _for_each(ids: Sequence[str], ask: Callable[[str], Awaitable[T]]) -> dict[str, T]:
    """The answer for each id. Questions are asked in batches."""
    answers: dict[str, T] = {}
    for some in in_batches(ids):
        answers.update(zip(some, await asyncio.gather(*map(ask, some)), strict=True))
    return answers


def in_batches(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    """The ids in batches of a size for one round of questions or commands."""
    return (ids[first : first + _BATCH_SIZE] for first in range(0, len(ids), _BATCH_SIZE))


class BackendOutage:
    """Tolerates the errors of a result backend until they have lasted too long."""

    def __init__(self) -> None:
        self._silent_since: float | None = None

    @contextmanager
    def tolerated(self) -> Iterator[None]:
        began = asyncio.get_running_loop().time()
        try:
            yield
        except Exception:
            # Any backend, any error: the backend may be unavailable, and is asked again.
            self._silent_since = self._silent_since or began
            if began - self._silent_since > MAX_OUTAGE_S:
                raise
        else:
            self._silent_since = None


@dataclass(eq=False)
class StreamWatch:
    """One watcher of one stream. While there is none, asks the result backend, ever less often."""

    watcher: ExecutionWatcher
    cursor: StreamCursor
    ask_backend: AskBackend | None = None
    result_channel: str | None = None
    """Where the result backend announces the result."""
    is_new: bool = False
    """The execution was submitted a moment ago: its stream is about to begin, so the backend is
    asked a little later only."""
    look_after: LookAfter | None = None

    def __post_init__(self) -> None:
        self._hears_results = False
        self._outage = BackendOutage()
        self._poll_s = _MIN_POLL_S
        self._ringing = asyncio.Event()
        self._time = asyncio.get_running_loop().time
        self._look_at = self._time() + FIRST_LOOK_S

    async def events(self) -> AsyncGenerator[Event, None]:
        """Every event after the cursor, once and in order; the last one is `Ended`."""
        cursor = self.cursor
        channel = self.watcher.store.keys_of(cursor.execution_id).channel
        self.watcher.watches += 1
        try:
            async with self.watcher.ringing(channel, self._ringing):
                while True:
                    self._ringing.clear()
                    page = await self._read()
                    cursor.record_presence(page, self._time())
                    for event in cursor.take(page):
                        yield event
                    if cursor.is_over:
                        return
                    if page is not None and page.events:
                        continue
                    if page is None and self.is_new:
                        self.is_new = False
                    elif page is None or page.state == "waiting":
                        ended, is_recent = await self._end_elsewhere(page)
                        if ended is not None:
                            # The task may have started and ended since the stream was read.
                            if await self._has_moved_on(page, _GRACE_S if is_recent else 0.0):
                                continue
                            yield cursor.end_without_stream(ended)
                            return
                    else:
                        self._leave_results()  # the execution has a stream, which will end
                        self._poll_s = _MIN_POLL_S
                        await self._look()
                    await wait_for_ring(self._ringing, self._wait_s(page))
        finally:
            self.watcher.watches -= 1
            self._leave_results()

    async def _read(self) -> Page | None:
        store, cursor = self.watcher.store, self.cursor
        return await retry_while_unavailable(
            lambda: store.read(cursor.execution_id, cursor.after), MAX_OUTAGE_S
        )

    def _wait_s(self, page: Page | None) -> float:
        """How long to wait for a doorbell before the stream or the result backend is read again."""
        if self.cursor.vanished_at is not None:
            left_s = self.cursor.vanished_at + _VANISHED_S - self._time()
            return left_s if left_s > 0 else _RETRY_DELAY_S
        wait_s = self._poll_s
        if self.ask_backend is None or (page is not None and page.state == "running"):
            wait_s = max(_CHECK_S, self.watcher.watches / _CHECKS_PER_S)
        if self.look_after is not None:
            wait_s = min(wait_s, max(0.0, self._look_at - self._time()))
        return wait_s

    async def _look(self) -> Ended | None:
        """Look after the execution if that is due; its end, if nothing else will tell it."""
        if self.look_after is None or self._time() < self._look_at:
            return None
        self._look_at = self._time() + max(LOOK_AGAIN_S, self.watcher.watches / _CHECKS_PER_S)
        return await self.look_after()

    async def _has_moved_on(self, page: Page | None, grace_s: float) -> bool:
        """Whether the stream has moved past the page, now or within the grace."""
        until = self._time() + grace_s
        while True:
            self._ringing.clear()
            if _is_newer(await self._read(), page):
                return True
            left_s = until - self._time()
            if left_s <= 0:
                return False
            await wait_for_ring(self._ringing, left_s)

    async def _end_elsewhere(self, page: Page | None) -> tuple[Ended | None, bool]:
        """The end that the stream does not tell, and whether it was stored a moment ago."""
        ended, is_recent = await self._ask_for_end()
        if ended is None and page is None:
            ended = await self._end_without_result()
        if ended is None:
            ended, is_recent = await self._look(), True
        return ended, is_recent

    async def _ask_for_end(self) -> tuple[Ended | None, bool]:
        answer: tuple[Ended | None, bool] = None, False
        if self.ask_backend is not None:
            self._poll_s = min(_MAX_POLL_S, self._poll_s * 2)
            with self._outage.tolerated():
                if self.result_channel is not None and not self._hears_results:
                    self._hears_results = True
                    await self.watcher.result_bells.listen(self.result_channel, self._ring)
                answer = await asyncio.to_thread(self.ask_backend, self.cursor.execution_id)
        return answer

    def _ring(self, _message: bytes | None) -> None:
        self._ringing.set()

    def _leave_results(self) -> None:
        if self._hears_results and self.result_channel is not None:
            self._hears_results = False
            self.watcher.result_bells.leave(self.result_channel, self._ring)

    async def _end_without_result(self) -> Ended | None:
        """The end of an execution that has neither a stream nor a result, or None.

        The task may ignore its result; then the index of recent executions may have the end. A
        stream that has vanished does not come back, but its task may still run: the execution is
        called lost only after the result had some time to be stored.
        """
        execution_id, vanished_at = self.cursor.execution_id, self.cursor.vanished_at
        try:
            found = await self.watcher.store.find_recent([execution_id])
        except StorageError:
            return None  # it is asked again
        if (ended := end_from_index(found.get(execution_id))) is not None:
            return ended
        has_vanished = vanished_at is not None and self._time() >= vanished_at + _VANISHED_S
        return _EXPIRED if has_vanished else None


class StreamCursor:
    """The position of one watcher in one stream. Does no I/O."""

    def __init__(self, execution_id: str, after: str | None) -> None:
        self.execution_id = execution_id
        self.after = after or ""
        self.is_over = False
        self.vanished_at: float | None = None
        """When a stream that had events was first found to be missing."""
        self._attempt, self._seq = _parts(self.after)
        self._offset = 0 if not after else None

    def record_presence(self, page: Page | None, now: float) -> None:
        if page is not None or not self.after:
            self.vanished_at = None
        elif self.vanished_at is None:
            self.vanished_at = now

    def take(self, page: Page | None) -> list[Event]:
        """The new events of a page, with a Gap before them where events are missing."""
        events: list[Event] = []
        for event in page.events if page is not None else ():
            events += self._gap_before(event)
            events.append(event)
            self.after = event.id
            self._attempt, self._seq = event.attempt, event.seq
            if isinstance(event.message, Output):
                self._offset = event.offset + utf8_size(event.message.data)
            elif isinstance(event.message, Gap):
                self._offset = event.offset
        if page is not None and page.state == "ended" and not page.events:
            events += self._end_without_events(page)
            self.is_over = True
        elif events:
            self.is_over = events[-1].is_last
        return events

    def _end_without_events(self, page: Page) -> list[Event]:
        """A Gap and an end for the rest of a stream that was evicted; nothing if all was seen."""
        if (self._attempt, self._seq) >= (page.attempt, page.seq):
            return []
        end = Event(f"{page.attempt}-{page.seq}", 0.0, _ended_as(page.outcome))
        gap = self._gap_before(end)
        self.after = end.id
        return [*gap, end]

    def end_without_stream(self, ended: Ended) -> Event:
        self.is_over = True
        return Event(id=f"{self._attempt}-{self._seq + 1}", at=0.0, message=ended)

    def _gap_before(self, event: Event) -> list[Event]:
        is_new = event.attempt != self._attempt
        expected = 1 if is_new else self._seq + 1
        if event.seq <= expected:
            if is_new:
                self._offset = 0
            return []
        known = 0 if is_new else self._offset
        is_output = isinstance(event.message, (Output, Gap))
        lost_bytes = max(0, event.offset - known) if known is not None and is_output else 0
        if isinstance(event.message, Gap):
            lost_bytes = max(0, lost_bytes - event.message.lost_bytes)
        gap = Gap(stream="stdout", lost_bytes=lost_bytes, lost_messages=event.seq - expected)
        at = f"{event.attempt}-{event.seq - 1}"
        return [Event(id=at, at=event.at, message=gap, offset=event.offset)]


def end_from_index(entry: RecentEntry | None) -> Ended | None:
    """The end that the index of recent executions has, or None."""
    if entry is None or entry.state not in _OUTCOMES:
        return None
    return _ended_as(entry.state)


def _ended_as(outcome: str) -> Ended:
    """An end with nothing but its outcome. An outcome of a newer version counts as lost."""
    return Ended(outcome=Outcome(outcome) if outcome in _OUTCOMES else Outcome.LOST)


def _is_newer(page: Page | None, before: Page | None) -> bool:
    """Whether a stream has changed between two reads."""
    if page is None:
        return False
    return before is None or bool(page.events) or page.state != before.state


def _parts(event_id: str) -> tuple[int, int]:
    attempt, _, seq = event_id.partition("-")
    return int(attempt or 0), int(seq or 0)


async def wait_for_ring(ringing: asyncio.Event, wait_s: float | None) -> None:
    """Wait until the event is set, at most `wait_s`."""
    try:
        async with asyncio.timeout(wait_s):
            await ringing.wait()
    except TimeoutError:
        return
