"""Executions in one Redis: their events, their commands, and the indexes of them.

Every write can be repeated: claims and commands carry an id, events their number in an attempt.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import msgspec

from capsule_tasks.errors import (
    AttemptClosed,
    AttemptStale,
    ExecutionEnded,
    ExecutionUnknown,
    InternalError,
)
from capsule_tasks.protocol.events import (
    AttemptEnded,
    Command,
    Ended,
    EventMessage,
    decode_event,
    encode_command,
    encode_event,
)
from capsule_tasks.settings import ExecutionSettings
from capsule_tasks.storage.drivers import drive
from capsule_tasks.storage.executions.types import (
    Claimed,
    CommandEntry,
    Event,
    GroupProgress,
    Page,
    RecentEntry,
    Record,
    State,
)
from capsule_tasks.storage.facades import AsyncFacade, AsyncTarget
from capsule_tasks.storage.keys import ExecutionKeys, GroupKeys, RecentKeys, doorbell_prefix
from capsule_tasks.storage.operations import Reply, call_script, new_operation, refused
from capsule_tasks.storage.scripts import Argument, Call, Code, script

_LOST = encode_event(AttemptEnded(outcome="lost", detail="another worker took the execution"))
_RETAKEN = encode_event(AttemptEnded(outcome="replaced", detail="its worker lost its lease"))
_TRIM_POINTS = 4
"""Trim points in the stream of an ended execution."""
_MAX_TRIM_POINTS = 4096
"""Trim points in the stream of a running execution: at its end one call may drop them all."""
PAGE = 128
UNCLAIMED = "-"
"""The `held_by` of a claim that is refused if the execution runs anywhere."""


@script("executions/claim")
def execution_claim(
    keys: ExecutionKeys,
    *,
    claim: str,
    owner: str,
    held_by: str,
    details: bytes,
    state: str,
    outcome: str,
    has_stream_content: int,
    lost: bytes,
    events: Sequence[bytes],
) -> None: ...


@script("executions/append")
def execution_append(
    keys: ExecutionKeys,
    *,
    attempt: int,
    first_seq: int,
    state: str,
    outcome: str,
    has_stream_content: int,
    limits: bytes,
    events: Sequence[bytes],
) -> None: ...


@script("executions/reap")
def execution_reap(
    keys: ExecutionKeys,
    *,
    owner: str,
    attempt: int,
    outcome: str,
    limits: bytes,
    event: bytes,
) -> None: ...


@script("executions/send_command")
def execution_send_command(
    keys: ExecutionKeys,
    *,
    command: str,
    ttl_ms: int,
    doorbell_prefix: str,
    execution: str,
    data: bytes,
) -> None: ...


@script("executions/commands")
def execution_commands(keys: ExecutionKeys, *, after: str) -> None: ...


@script("executions/read")
def execution_read(keys: ExecutionKeys, *, after: str, count: int) -> None: ...


@script("executions/record")
def execution_record(keys: ExecutionKeys) -> None: ...


@script("executions/recent_drop")
def recent_drop(keys: RecentKeys, *, ids: Sequence[str]) -> None: ...


@script("executions/recent_record")
def recent_record(
    keys: RecentKeys, *, max_entries: int, ttl_ms: int, updates: Sequence[Argument]
) -> None: ...


@script("executions/recent_list")
def recent_list(keys: RecentKeys, *, before: str, count: int) -> None: ...


@script("executions/recent_find")
def recent_find(keys: RecentKeys, *, ids: Sequence[str]) -> None: ...


@script("executions/group_record")
def group_record(
    keys: GroupKeys, *, ttl_ms: int, max_failures: int, members: Sequence[Argument]
) -> None: ...


@script("executions/group_read")
def group_read(keys: GroupKeys, *, after: str, count: int, which: int) -> None: ...


class ExecutionStore(AsyncFacade):
    """Events, commands and indexes of executions in Redis."""

    def __init__(self, redis: AsyncTarget, *, settings: ExecutionSettings | None = None) -> None:
        super().__init__(redis)
        self.settings = settings or ExecutionSettings()
        prefix = self.settings.prefix
        self._retry = self.settings.retry
        self._doorbell_prefix = doorbell_prefix(prefix)
        self._recent = RecentKeys(prefix)
        self.recent_channel = self._recent.channel

    def keys_of(self, execution_id: str) -> ExecutionKeys:
        return ExecutionKeys(execution_id, self.settings.prefix)

    def group_keys_of(self, group_id: str) -> GroupKeys:
        return GroupKeys(group_id, self.settings.prefix)

    def doorbell_of(self, incarnation: str) -> str:
        return self._doorbell_prefix + incarnation

    # --- workers -------------------------------------------------------------------------------

    @staticmethod
    def claimed(execution_id: str, reply: Reply) -> Claimed:
        """The attempt that a claim got. Raises ExecutionEnded or AttemptStale."""
        match reply[0]:
            case Code.DONE:
                return Claimed(int(reply[1]), int(reply[2]), _entries(reply[3:]))
            case Code.ENDED:
                raise ExecutionEnded(execution_id, reply[1].decode())
            case Code.STALE:
                raise AttemptStale(execution_id, 0, int(reply[1]), reply[2].decode())
        raise refused(reply, "a claim")

    @staticmethod
    def appended(execution_id: str, call: Call, reply: Reply) -> int:
        """The number of the last stored event.

        Raises AttemptStale if another attempt followed, AttemptClosed if the attempt has ended,
        ExecutionUnknown if nothing of the execution is left.
        """
        attempt, first_seq = int(call.args[0]), call.args[1]
        match reply[0]:
            case Code.DONE:
                return int(reply[1])
            case Code.MISSING:
                raise ExecutionUnknown(execution_id)
            case Code.STALE:
                raise AttemptStale(execution_id, attempt, int(reply[1]), reply[2].decode())
            case Code.ENDED:
                raise AttemptClosed(execution_id, attempt, reply[1].decode())
            case Code.CONFLICT:
                raise InternalError(
                    f"execution {execution_id!r} has {reply[1]!r} events, the next is {first_seq!r}"
                )
        raise refused(reply, "an append")

    async def call(self, call: Call) -> Reply:
        """The reply to a call, which is repeated where a reply is lost."""
        return await drive(call_script(call, self._retry), self.store)

    async def reap(
        self,
        execution_id: str,
        owner: str,
        attempt: int,
        event: EventMessage,
        outcome: str = "",
        *,
        retention: ExecutionSettings | None = None,
    ) -> bool:
        """Write the end of an attempt whose worker died; False if another reaper was first."""
        keys = self.keys_of(execution_id)
        call = execution_reap.call(
            keys,
            owner=owner,
            attempt=attempt,
            outcome=outcome,
            limits=limits_of(retention or self.settings),
            event=encode_event(event),
        )
        reply = await self.call(call)
        return bool(reply[0] == Code.DONE)

    async def read_commands(self, execution_id: str, after: str = "") -> tuple[CommandEntry, ...]:
        """Commands to an execution after the given entry."""
        call = execution_commands.call(self.keys_of(execution_id), after=after)
        reply = await self.call(call)
        return _entries(reply[1:])

    # --- watchers ------------------------------------------------------------------------------

    async def send_command(
        self, execution_id: str, command: Command, *, command_id: str | None = None
    ) -> State:
        """Send a command, also before the execution starts; its state. Raises ExecutionEnded."""
        call = execution_send_command.call(
            self.keys_of(execution_id),
            command=command_id or new_operation(),
            ttl_ms=_ms(self.settings.control_ttl_s),
            doorbell_prefix=self._doorbell_prefix,
            execution=execution_id,
            data=encode_command(command),
        )
        reply = await self.call(call)
        if reply[0] == Code.ENDED:
            raise ExecutionEnded(execution_id, reply[1].decode())
        return _state(reply[1])

    async def end_unclaimed(
        self,
        execution_id: str,
        ended: Ended,
        *,
        task: str,
        group: str = "",
        index: int = -1,
        kept_s: float | None = None,
    ) -> int:
        """End an execution that nobody runs, in one step; the number of its attempt.

        Nobody can claim it as long as this end is kept: for `kept_s`, else as that of any silent
        execution. Raises AttemptStale if it is running, ExecutionEnded if it has ended.
        """
        retention = self.settings
        if kept_s is not None:
            retention = msgspec.structs.replace(retention, silent_retention_s=kept_s)
        call = execution_claim.call(
            self.keys_of(execution_id),
            claim=new_operation(),
            owner="",
            held_by=UNCLAIMED,
            details=attempt_details("early", task, "", group, index, retention),
            state="ended",
            outcome=str(ended.outcome),
            has_stream_content=0,
            lost=b"",
            events=[encode_event(ended)],
        )
        return self.claimed(execution_id, await self.call(call)).attempt

    async def read(self, execution_id: str, after: str = "", count: int = PAGE) -> Page | None:
        """A page of events after the given one; None for an unknown execution."""
        call = execution_read.call(self.keys_of(execution_id), after=after, count=count)
        reply = await self.call(call)
        if reply[0] == Code.MISSING:
            return None
        _, state, outcome, attempt, seq, first_kept_id, *flat = reply
        events = tuple(
            Event(flat[n].decode(), int(flat[n + 1]) / 1000, *decode_event(flat[n + 2]))
            for n in range(0, len(flat), 3)
        )
        return Page(
            _state(state), outcome.decode(), int(attempt), int(seq), first_kept_id.decode(), events
        )

    async def read_record(self, execution_id: str) -> Record:
        """The state of an execution and its latest attempt."""
        reply = await self.call(execution_record.call(self.keys_of(execution_id)))
        if reply[0] == Code.MISSING:
            return Record("unknown")
        words = [value.decode(errors="replace") for value in reply[1:]]
        return Record(
            state=_state(reply[1]),
            attempt=int(words[1] or 0),
            owner=words[2],
            worker=words[3],
            task=words[4],
            ack=words[5],
            outcome=words[6],
            claimed_at=_seconds(words[7]),
            ended_at=_seconds(words[8]),
            group=words[9],
            index=int(words[10] or -1),
            has_stream_content=words[11] == "content",
        )

    # --- indexes -------------------------------------------------------------------------------

    async def record_recent(self, notes: Sequence[tuple[int, RecentEntry]]) -> None:
        """Record executions in the index of recent ones, each with its attempt."""
        settings = self.settings
        parts: list[Argument] = []
        for attempt, entry in notes:
            record = {"s": entry.state, "t": entry.task, "w": entry.worker, "b": entry.started_at}
            parts += [entry.execution_id, attempt, msgspec.json.encode(record)]
        call = recent_record.call(
            self._recent,
            max_entries=settings.recent_max,
            ttl_ms=_ms(settings.recent_ttl_s),
            updates=parts,
        )
        await self.call(call)

    async def drop_recent(self, execution_ids: Sequence[str]) -> None:
        """Drop a page of executions from the index of recent ones."""
        await self.call(recent_drop.call(self._recent, ids=execution_ids))

    async def list_recent(
        self,
        *,
        state: str | None = None,
        task: str | None = None,
        since: float | None = None,
        limit: int = 50,
    ) -> list[RecentEntry]:
        """Recent executions, latest first: of a state, of a task, since a time."""
        found: list[RecentEntry] = []
        before = ""
        while len(found) < limit:
            call = recent_list.call(self._recent, before=before, count=500)
            reply = await self.call(call)
            page = [_recent(*reply[n : n + 3]) for n in range(1, len(reply), 3)]
            for entry in page:
                if since is not None and entry.recorded_at < since:
                    return found[:limit]
                if state in (None, entry.state) and task in (None, entry.task):
                    found.append(entry)
            if not page:
                break
            before = reply[-2].decode()
        return found[:limit]

    async def find_recent(self, execution_ids: Sequence[str]) -> dict[str, RecentEntry]:
        """Entries of the index by execution; they may outlive the executions' streams."""
        call = recent_find.call(self._recent, ids=execution_ids)
        reply = await self.call(call)
        entries = (_recent(*reply[n : n + 3]) for n in range(1, len(reply), 3))
        return {entry.execution_id: entry for entry in entries}

    async def record_group_ends(
        self, group_id: str, members: Sequence[tuple[int, str, str, str]]
    ) -> None:
        """Count ends of members, each once: (index, outcome, execution id, failure)."""
        keys, settings = self.group_keys_of(group_id), self.settings
        parts: list[Argument] = []
        for index, outcome, execution_id, failure in members:
            is_failure = outcome in ("failed", "lost")
            said = msgspec.json.encode([execution_id, failure[:1000]]) if is_failure else b""
            parts += [index, outcome, said]
        call = group_record.call(
            keys,
            ttl_ms=_ms(settings.group_ttl_s),
            max_failures=settings.group_failures,
            members=parts,
        )
        await self.call(call)

    async def read_group(
        self, group_id: str, after: str = "", count: int = 100, *, which: bool = False
    ) -> GroupProgress:
        """How many members ended, failures after the given one, and `which` members, if wanted."""
        keys = self.group_keys_of(group_id)
        call = group_read.call(keys, after=after, count=count, which=int(which))
        reply = await self.call(call)
        end = 3 + 2 * int(reply[2])
        counts = {reply[n].decode(): int(reply[n + 1]) for n in range(3, end, 2)}
        failures = tuple(
            (reply[n].decode(), *msgspec.json.decode(reply[n + 1], type=tuple[str, str]))
            for n in range(end, len(reply), 2)
        )
        return GroupProgress(counts, failures, reply[1] if which else None)


def end_of_previous(held_by: str) -> bytes:
    """The event that ends the attempt before a claim, if the owner `held_by` may have one."""
    return _LOST if held_by == "" else b"" if held_by == UNCLAIMED else _RETAKEN


@lru_cache(maxsize=1000)
def attempt_details(
    ack: str, task: str, worker: str, group: str, index: int, retention: ExecutionSettings
) -> bytes:
    """The part of a claim that describes the attempt."""
    place = str(index) if group else ""
    return msgspec.msgpack.encode([ack, task, worker, group, place, limits_of(retention).decode()])


@lru_cache(maxsize=1000)
def limits_of(retention: ExecutionSettings) -> bytes:
    """Sizes and times of retention as the scripts take them; see lib/execution."""
    trim_bytes = max(
        1, retention.retention_bytes // _TRIM_POINTS, retention.live_bytes // _MAX_TRIM_POINTS
    )
    numbers = (trim_bytes, retention.live_bytes, retention.retention_bytes)
    times = (
        _ms(retention.unfinished_ttl_s),
        _ms(retention.retention_s),
        _ms(retention.silent_retention_s),
    )
    return " ".join(map(str, (*numbers, *times))).encode()


def _ms(seconds: float) -> int:
    return int(seconds * 1000)


def _seconds(ms: str) -> float | None:
    return int(ms) / 1000 if ms else None


def _state(value: bytes) -> State:
    state: State = value.decode() or "unknown"  # type: ignore[assignment]
    return state


def _entries(flat: Reply) -> tuple[CommandEntry, ...]:
    return tuple(CommandEntry(flat[n].decode(), flat[n + 1]) for n in range(0, len(flat), 2))


class _RecentRecord(msgspec.Struct):
    s: str = ""
    t: str = ""
    w: str = ""
    b: float | None = None


_recent_record = msgspec.json.Decoder(_RecentRecord).decode


def _recent(execution_id: bytes, noted: bytes, record: bytes) -> RecentEntry:
    known = _recent_record(record)
    return RecentEntry(execution_id.decode(), int(noted) / 1e6, known.s, known.t, known.w, known.b)
