"""Watch executions on one event loop: thousands of them over two connections.

Redis is the truth. A doorbell wakes a watcher, and the watcher reads the events after the last one
it has seen. An execution without a stream is looked up in the result backend: when the backend's
own channel rings, if the backend is a Redis, and otherwise ever more seldom.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from capsule_tasks.errors import ExecutionEnded, StorageError
from capsule_tasks.protocol.events import Command, Ended, Outcome
from capsule_tasks.protocol.flow import utf8_size
from capsule_tasks.protocol.messages import Gap, Output
from capsule_tasks.settings import ExecutionSettings
from capsule_tasks.storage.connections.doorbells import Doorbells
from capsule_tasks.storage.connections.pipelined import PipelinedConnection
from capsule_tasks.storage.drivers import retry_while_unavailable
from capsule_tasks.storage.executions.store import ExecutionStore
from capsule_tasks.storage.executions.types import Event, Page, RecentEntry, State
from capsule_tasks.storage.operations import new_operation

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


class ExecutionWatcher:
    """Watches executions of one Redis on one event loop. Made on that loop; `close` ends it."""

    def __init__(self, url: str, settings: ExecutionSettings, backend_url: str | None) -> None:
        self.connection = PipelinedConnection(url)
        self.store = ExecutionStore(self.connection, settings=settings)
        self.bells = Doorbells(url, timeout_s=MAX_OUTAGE_S)
        self._watchers = 0
        self._result_bells = self.bells
        if backend_url is not None and backend_url != url:
            self._result_bells = Doorbells(backend_url, timeout_s=_RESULT_BELL_S)

    async def close(self) -> None:
        await self.bells.close()
        if self._result_bells is not self.bells:
            await self._result_bells.close()
        await self.connection.close()

    async def events(
        self,
        execution_id: str,
        after: str | None,
        ask_backend: AskBackend | None,
        result_channel: str | None,
        outage_s: float = MAX_OUTAGE_S,
    ) -> AsyncGenerator[Event, None]:
        """Every event after the id `after`, once and in order; the last one is `Ended`."""
        channel = self.store.core.keys_of(execution_id).channel
        ringing = asyncio.Event()

        def ring(_message: bytes | None) -> None:
            ringing.set()

        loop = asyncio.get_running_loop()
        watch = StreamCursor(execution_id, after)
        result_ring = ResultPoller(self, result_channel, ask_backend, ringing, outage_s)
        self._watchers += 1
        try:
            await self.bells.listen(channel, ring)
            while True:
                ringing.clear()
                page = await self._read(watch, outage_s)
                watch.record_presence(page, loop.time())
                for event in watch.take(page):
                    yield event
                if watch.is_over:
                    return
                if page is not None and page.events:
                    continue
                if page is None or page.state == "waiting":
                    ended, is_recent = await result_ring.look(execution_id)
                    if ended is None and page is None:
                        ended = await self._end_without_result(watch, loop.time())
                    if ended is not None:
                        # The task may have started and ended since the stream was read.
                        grace_s = _GRACE_S if is_recent else 0.0
                        if await self._has_moved_on(watch, page, ringing, grace_s, outage_s):
                            continue
                        yield watch.end_without_stream(ended)
                        return
                else:
                    result_ring.rest()
                await wait_for_ring(ringing, self._wait_s(watch, page, result_ring, loop.time()))
        finally:
            self._watchers -= 1
            self.bells.leave(channel, ring)
            result_ring.leave()

    def _wait_s(
        self, watch: StreamCursor, page: Page | None, result_ring: ResultPoller, now: float
    ) -> float:
        """How long to wait for a doorbell before the stream or the result backend is read again."""
        if watch.vanished_at is not None:
            left_s = watch.vanished_at + _VANISHED_S - now
            return left_s if left_s > 0 else _RETRY_DELAY_S
        is_running = page is not None and page.state == "running"
        check_s = max(_CHECK_S, self._watchers / _CHECKS_PER_S)
        return check_s if is_running else result_ring.wait_s or check_s

    async def _has_moved_on(
        self,
        watch: StreamCursor,
        page: Page | None,
        ringing: asyncio.Event,
        grace_s: float,
        outage_s: float,
    ) -> bool:
        """Whether the stream has moved past the page, now or within the grace."""
        loop = asyncio.get_running_loop()
        until = loop.time() + grace_s
        while True:
            ringing.clear()
            if _is_newer(await self._read(watch, outage_s), page):
                return True
            left_s = until - loop.time()
            if left_s <= 0:
                return False
            await wait_for_ring(ringing, left_s)

    async def send_command_to_all(self, ids: Sequence[str], command: Command) -> dict[str, State]:
        """Send a command to executions; the state of each after that.

        A task that started some milliseconds ago may not be claimed yet. The doorbell of the
        command has its worker claim it at once, so unclaimed executions get a short wait together.
        """
        channels = {one: self.store.core.keys_of(one).channel for one in ids}  # or InvalidId
        states = await _for_each(ids, lambda one: self._tell(one, command))
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
            heard = await self.states(unclaimed)
            silent -= {one for one, state in heard.items() if state != states[one]}
            if silent:
                await wait_for_ring(all_rang, _CLAIM_S)
            rang = [one for one in unclaimed if one not in silent]
            return states | heard | await self.states(rang)
        finally:
            for one in unclaimed:
                self.bells.leave(channels[one], rings[one])

    async def _tell(self, execution_id: str, command: Command) -> State:
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

    async def _end_without_result(self, watch: StreamCursor, now: float) -> Ended | None:
        """The end of an execution that has neither a stream nor a result, or None.

        The task may ignore its result; then the index of recent executions may have the end. A
        stream that has vanished does not come back, but its task may still run: the execution is
        called lost only after the result had some time to be stored.
        """
        try:
            found = await self.store.find_recent([watch.execution_id])
        except StorageError:
            return None  # the caller asks again
        if (ended := end_from_index(found.get(watch.execution_id))) is not None:
            return ended
        vanished_at = watch.vanished_at
        return _EXPIRED if vanished_at is not None and now >= vanished_at + _VANISHED_S else None

    async def _read(self, watch: StreamCursor, outage_s: float) -> Page | None:
        return await retry_while_unavailable(
            lambda: self.store.read(watch.execution_id, watch.after), outage_s
        )


async def _for_each(ids: Sequence[str], ask: Callable[[str], Awaitable[T]]) -> dict[str, T]:
    """The answer for each id. Questions are asked in batches."""
    answers: dict[str, T] = {}
    for some in in_batches(ids):
        answers.update(zip(some, await asyncio.gather(*map(ask, some)), strict=True))
    return answers


def in_batches(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    """The ids in batches of a size for one round of questions or commands."""
    return (ids[first : first + _BATCH_SIZE] for first in range(0, len(ids), _BATCH_SIZE))


class ResultPoller:
    """Asks the result backend for the end of one execution, ever more seldom."""

    def __init__(
        self,
        watcher: ExecutionWatcher,
        channel: str | None,
        ask: AskBackend | None,
        ringing: asyncio.Event,
        outage_s: float,
    ) -> None:
        self._outage_s = outage_s
        self._silent_since: float | None = None
        self._bells = watcher._result_bells  # noqa: SLF001  its other half
        self._channel = channel
        self._ask = ask
        self._ringing = ringing
        self._listens = False
        self._wait_s = _MIN_POLL_S

    async def look(self, execution_id: str) -> tuple[Ended | None, bool]:
        if self._ask is None:
            return None, False
        self._wait_s = min(_MAX_POLL_S, self._wait_s * 2)
        began = asyncio.get_running_loop().time()
        try:
            if self._channel is not None and not self._listens:
                self._listens = True
                await self._bells.listen(self._channel, self._ring)
            answer = await asyncio.to_thread(self._ask, execution_id)
        except Exception:
            # Any backend, any error: the backend may be unavailable, and is asked again.
            self._silent_since = self._silent_since or began
            if began - self._silent_since > self._outage_s:
                raise
            return None, False
        self._silent_since = None
        return answer

    @property
    def wait_s(self) -> float | None:
        """How long to wait for the backend's channel; None if there is no backend."""
        return self._wait_s if self._ask is not None else None

    def rest(self) -> None:
        """Stop asking: the execution has a stream, which will end."""
        self.leave()
        self._wait_s = _MIN_POLL_S

    def leave(self) -> None:
        if self._listens and self._channel is not None:
            self._listens = False
            self._bells.leave(self._channel, self._ring)

    def _ring(self, _message: bytes | None) -> None:
        self._ringing.set()


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
