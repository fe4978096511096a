"""The children of a pool, and which job is in which: all of it on the runtime's loop.

A *member* is one session on loan from the session pool. Blocking members take one job at a time;
async members take many, and are beside the others: neither kind ever waits for the other. A member
whose child ends is given back, and another is hired.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Literal

from capsule_tasks.errors import CapsuleError, PoolUnavailable
from capsule_tasks.executions.delay import Delay
from capsule_tasks.protocol.messages import (
    Ack,
    Gap,
    Heartbeat,
    InputRequest,
    Message,
    Output,
    Terminal,
    Traced,
)
from capsule_tasks.sessions import SessionPool
from capsule_tasks.sessions.session import Session
from capsule_tasks.sessions.states import OVER, SessionState
from capsule_tasks.system.usage import resident_bytes
from capsule_tasks.taskpool.bridge import Bridge
from capsule_tasks.taskpool.endings import another, ending_of_traced
from capsule_tasks.taskpool.jobs import SILENT, Job, Stage
from capsule_tasks.taskpool.losses import Losses
from capsule_tasks.taskpool.outcomes import Outcomes, settle

log = logging.getLogger("capsule_tasks.taskpool")

Kind = Literal["blocking", "async"]

_LEAVING: dict[Kind, int] = {"blocking": 1, "async": 9}
"""Children that may be there beside so many as were asked for, while they finish what they have.

A blocking one has one job, whose slot is taken until then: one that is ended is all there is. The
coroutines of an async one may go on for hours, and those that wait have no part in that.
"""
_RETRY_S = 1.0
_TIDY_S = 0.1
"""What a task has for its `finally` blocks at a hard limit, as under prefork."""
_UNHEARD_S = 0.05
"""A child that was free has begun by then. Code that holds the interpreter from its first line, or
stops its own process, keeps the child from saying so; limits and cancels count all the same."""
MOST_BARREN = 3
"""Children in a row that may end before their first task, until their successors are delayed."""
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 30.0
"""After the session pool said that it has none to give."""
_ASYNC_GRACE_S = 5.0
"""From the cancel of a coroutine to the kill of its child and so of its neighbours."""


@dataclasses.dataclass(eq=False)
class Member:
    """One child and what it has in hand."""

    session: Session
    kind: Kind
    pid: int
    jobs: dict[str, Job] = dataclasses.field(default_factory=dict)
    taken: int = 0
    worn: str = ""
    """Why it takes nothing new, and is let go when what it has in hand is over."""


@dataclasses.dataclass(frozen=True)
class CrewLimits:
    """When a member is replaced, how much an async one takes on, and what may cost how many."""

    max_tasks: int | None = None
    max_rss_bytes: int | None = None
    async_limit: int = 1000
    losses: int = 5
    losses_url: str | None = None
    """The Redis where they are counted, over all workers."""
    losses_prefix: str = "capsule"


class Crew:
    """Gives jobs to members in order of arrival; says on the bridge what becomes of each."""

    def __init__(
        self,
        pool: SessionPool,
        limits: CrewLimits,
        bridge: Bridge,
        on_output: Callable[[Job, Output | Gap], None],
        on_over: Callable[[Job], None],
        on_told: Callable[[Job], None],
        on_end: Callable[[Job], None],
    ) -> None:
        self.size: dict[Kind, int] = {"blocking": 0, "async": 0}
        self.members: dict[Kind, list[Member]] = {"blocking": [], "async": []}
        self.waiting: dict[Kind, deque[Job]] = {"blocking": deque(), "async": deque()}
        self.totals: Counter[str] = Counter()
        self.last_error = ""
        self.barren = 0
        """Children in a row that ended before they had a task."""
        self._free: deque[Member] = deque()
        self._pool = pool
        self._limits = limits
        self._bridge = bridge
        self._on_output = on_output
        self._on_end = on_end
        self._hiring: dict[Kind, set[asyncio.Task[None]]] = {"blocking": set(), "async": set()}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._checking: set[Job] = set()
        """Delivered before, and not yet in line."""
        self._unknown: set[str] = set()
        """Tasks that only children of the next era know, and what is to run of them."""
        self._early: list[Job] = []
        self._losses = Losses(limits.losses, limits.losses_url, limits.losses_prefix)
        self._outcomes = Outcomes(bridge, self._losses, self._spawn, on_over, on_told)
        self._unheard = Delay[tuple[Member, Job]](_UNHEARD_S, self._on_unheard)
        self._stopped = False
        self._era = 0
        """Grows when all are replaced: whoever was asked for before may be what is replaced."""

    # --- size ----------------------------------------------------------------------------------

    def resize(self, kind: Kind, size: int) -> None:
        """Have so many members from now on; busy ones that are too many finish first."""
        self.size[kind] = size
        self._pool.resize(kind, self._most(kind))
        self._balance(kind)

    def replace_all(self, why: str) -> None:
        """Let every member go once it has finished what it has in hand."""
        self._era += 1
        for kind, members in self.members.items():
            for member in list(members):
                member.worn = member.worn or why
                if member in self._free:
                    self._free.remove(member)
                self._let_go_if_done(member)
            self._balance(kind)

    def is_worn_out(self, kind: Kind) -> bool:
        """Whether jobs wait and there may be no other child until one has finished; any thread."""
        members = list(self.members[kind])
        is_full = len(members) >= self._most(kind) and all(member.worn for member in members)
        return is_full and bool(self.waiting[kind])

    def _most(self, kind: Kind) -> int:
        return self.size[kind] + _LEAVING[kind]

    def free_count(self) -> int:
        """Blocking members that nothing is running in, those still on their way included."""
        busy = sum(bool(member.jobs) for member in self.members["blocking"])
        return self.size["blocking"] - busy - len(self.waiting["blocking"])

    def _balance(self, kind: Kind) -> None:
        if self._stopped:
            return
        members = [member for member in self.members[kind] if not member.worn]
        missing = self.size[kind] - len(members) - len(self._hiring[kind])
        for _ in range(missing):
            task = asyncio.get_running_loop().create_task(self._hire(kind))
            self._hiring[kind].add(task)
            task.add_done_callback(self._hiring[kind].discard)
        for member in sorted(members, key=lambda m: len(m.jobs))[: max(0, -missing)]:
            member.worn = "the pool has shrunk"
            self._let_go_if_done(member)

    async def _hire(self, kind: Kind) -> None:
        """Borrow a session, for as long as it takes to get one."""
        if self.barren > MOST_BARREN:
            pause_s = _FIRST_PAUSE_S * 2 ** min(self.barren - MOST_BARREN, 10)
            await asyncio.sleep(min(pause_s, _LONGEST_PAUSE_S))
        while True:
            era = self._era
            try:
                session = await self._pool.acquire(kind)
                if era == self._era:
                    break
                self._pool.retire(session)
            except PoolUnavailable as news:
                self.last_error = str(news)
                log.error("%s", self.last_error)  # noqa: TRY400 - it says all there is
                await asyncio.sleep(_RETRY_S)
        self._hiring[kind].discard(asyncio.current_task())
        if self._stopped or sum(not m.worn for m in self.members[kind]) >= self.size[kind]:
            self._pool.release(session)
            return
        pid = session.info.pid
        member = Member(session, kind, pid or 0)
        self.members[kind].append(member)
        session.add_state_listener(partial(self._on_state, member), OVER)
        session.add_heartbeat_listener(partial(self._on_heartbeat, member))
        if pid is None:  # it died between the loan and now
            self._on_state(member, session.state, SessionState.ERROR)
        elif kind == "blocking":
            self._free.append(member)
        self._dispatch(kind)

    def _wear_out(self, member: Member, why: str) -> None:
        """It takes nothing new; coroutines do not wait for a successor until it has finished."""
        member.worn = member.worn or why
        if member.kind == "async":
            self._balance("async")

    def _let_go_if_done(self, member: Member) -> None:
        if member.worn and not member.jobs and member in self.members[member.kind]:
            self._remove(member)
            self._pool.retire(member.session)
            self._balance(member.kind)

    def _give_up(self, member: Member, why: CapsuleError) -> None:
        """It takes nothing new: have a successor while its neighbours may finish."""
        self.totals["children_lost"] += not member.worn and not member.session.is_alive
        member.worn = member.worn or str(why)
        self._let_go_if_done(member)
        self._balance(member.kind)

    def _remove(self, member: Member) -> None:
        self.members[member.kind].remove(member)
        if member in self._free:
            self._free.remove(member)

    # --- jobs ----------------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        if job.stage is Stage.OVER:
            return
        if not job.is_async and self._losses.is_suspect(job.call):
            self._checking.add(job)
            self._spawn(self._check(job))
        else:
            self._enqueue(job)

    async def _check(self, job: Job) -> None:
        """Whether a message that was delivered before may cost one more process."""
        error = await self._losses.admit(job.call)
        self._checking.discard(job)
        if job.stage is Stage.OVER:
            await self._losses.forget(job.call)
        elif error is not None:
            self._outcomes.fail(job, error)
        else:
            self._enqueue(job)

    def expect(self, names: set[str]) -> None:
        """Jobs of these tasks wait for children that know them."""
        self._unknown |= names

    def learn(self, names: set[str]) -> None:
        """The next child knows these, or will never know them: either way their jobs go on."""
        self._unknown -= names
        early, self._early = self._early, []
        for job in early:
            if job.stage is not Stage.OVER:
                self._enqueue(job)

    def _enqueue(self, job: Job) -> None:
        if job.call.name in self._unknown:
            self._early.append(job)
            return
        kind: Kind = "async" if job.is_async else "blocking"
        self.waiting[kind].append(job)
        self._dispatch(kind)

    def drop_waiting(self) -> None:
        """The connection is lost: what no child has begun will be delivered again."""
        for jobs in self.waiting.values():
            while jobs:
                self.drop(jobs.popleft())
        early, self._early = self._early, []
        for job in (*self._checking, *early):
            if job.stage is not Stage.OVER:
                self.drop(job)

    def drop(self, job: Job) -> None:
        """It has not begun and will be delivered again; Celery is told nothing."""
        self._outcomes.end(job, None, another("requeued", "the connection to the broker was lost"))

    def terminate(self, job: Job, signum: int, asker: str) -> None:
        """End one job, and no other, with a signal or as a coroutine is ended."""
        if job.stage is Stage.OVER:
            return
        job.note_stop(signum, asker)  # a second one, stronger, may follow
        member = self._member_of(job)
        if member is None:
            for jobs in self.waiting.values():
                if job in jobs:
                    jobs.remove(job)
            self._outcomes.lose(job, Traced(execution_id=job.execution_id), None)
        elif member.kind == "async":
            self._spawn(member.session.cancel(job.execution_id, _ASYNC_GRACE_S))
        elif signum == signal.SIGKILL:
            self._kill(member)
        else:
            # It cannot hit another task: a child has one at a time, and gets the next one only
            # when this thread has heard the end of the last.
            member.worn = member.worn or f"a task was terminated with signal {signum}"
            member.session.signal(signum)

    def cancel(self, job: Job, grace_s: float, asker: str) -> None:
        """End one job in order, and by force after the grace; also one that has not begun."""
        member = self._member_of(job)
        if member is None:
            self.terminate(job, signal.SIGTERM, asker)
        elif job.stage is not Stage.OVER:
            job.note_stop(job.signum or int(signal.SIGTERM), asker)
            self._spawn(member.session.cancel(job.execution_id, grace_s))

    def end_input(self, job: Job, request_id: str) -> None:
        """Have `input()` raise EOFError: nobody can hear what it asks."""
        session = self.session_of(job)
        if session is not None:
            self._spawn(_end_input(session, job.execution_id, request_id))

    def session_of(self, job: Job) -> Session | None:
        """Where a job runs now."""
        member = self._member_of(job)
        return member.session if member is not None else None

    def kill_busy(self) -> None:
        """End all that runs, also what no signal reaches."""
        for members in self.members.values():
            for member in members:
                for job in member.jobs.values():
                    if job.signum is None:
                        job.note_stop(signal.SIGKILL, "the worker's cold shutdown")
                if member.jobs:
                    self._kill(member)

    def job_of(self, pid: int) -> Job | None:
        """The only job of a process, for callers that know no better."""
        for member in self.members["blocking"]:
            if member.pid == pid:
                return next(iter(member.jobs.values()), None)
        return None

    async def stop(self) -> None:
        """Give every session back; jobs still in hand end with the pool."""
        self._stopped = True
        hiring = {task for tasks in self._hiring.values() for task in tasks}
        for task in (*hiring, *self._tasks):
            task.cancel()
        for members in self.members.values():
            for member in members:
                for job in list(member.jobs.values()):
                    settle(job)
        self.drop_waiting()
        await self._losses.close()

    def _dispatch(self, kind: Kind) -> None:
        waiting = self.waiting[kind]
        while waiting:
            member = self._next_member(kind)
            if member is None:
                return
            self._send(member, waiting.popleft())

    def _next_member(self, kind: Kind) -> Member | None:
        if kind == "blocking":
            return self._free.popleft() if self._free else None
        able = [m for m in self.members["async"] if not m.worn]
        member = min(able, key=lambda m: len(m.jobs), default=None)
        return member if member and len(member.jobs) < self._limits.async_limit else None

    def _send(self, member: Member, job: Job) -> None:
        while job.execution_id in member.jobs:  # the same message, delivered twice
            job.execution_id += "~"
        job.stage = Stage.SENT
        job.pid = member.pid
        member.jobs[job.execution_id] = job
        member.taken += 1
        most = self._limits.max_tasks
        if most is not None and member.taken >= most:
            self._wear_out(member, f"it has run {member.taken} tasks")
        try:
            member.session.submit(
                job.call, partial(self._on_said, member, job), execution_id=job.execution_id
            )
        except CapsuleError as error:
            # Its child has ended, which its state says a moment later; or it is condemned by a
            # coroutine that does not stop. The job has not begun.
            log.info("a job goes to another session: %s", error)
            del member.jobs[job.execution_id]
            job.stage = Stage.WAITING
            self.waiting[member.kind].appendleft(job)
            self._give_up(member, error)
        else:
            if member.kind == "blocking":
                self._unheard.add((member, job))

    def _on_unheard(self, sent: list[tuple[Member, Job]]) -> None:
        for member, job in sent:
            if member.jobs.get(job.execution_id) is job:
                self._accept(member, job, time.monotonic() - _UNHEARD_S)

    # --- what children say ---------------------------------------------------------------------

    def _on_said(self, member: Member, job: Job, message: Message) -> bool | None:
        """False if there is no room for more output of this job."""
        if isinstance(message, Ack):
            self._accept(member, job, message.accepted_at)
        elif isinstance(message, Terminal):
            self._on_terminal(member, job, message)
        else:
            if isinstance(message, (Output, Gap)):
                self._on_output(job, message)
            elif isinstance(message, InputRequest) and not job.publication.is_heard:
                self.end_input(job, message.id)
            has_room: bool | None = job.publication.say(message)
            return has_room
        return None

    def _accept(self, member: Member, job: Job, accepted_at: float) -> None:
        if job.stage is not Stage.SENT:
            return
        job.stage = Stage.ACCEPTED
        self._unheard.discard((member, job))
        waits = job.acks_when_claimed and job.publication is not SILENT
        self._bridge.put(partial(job.say_accepted, member.pid, accepted_at, puts_ack_off=waits))
        claimed = partial(self._bridge.put, job.say_claimed) if waits else None
        job.publication.accepted(member.pid, claimed)
        if not (job.soft_limit_s or job.hard_limit_s):
            return
        loop = asyncio.get_running_loop()
        if job.soft_limit_s:
            job.timers.append(loop.call_later(job.soft_limit_s, self._on_soft_limit, member, job))
        if job.hard_limit_s:
            job.timers.append(loop.call_later(job.hard_limit_s, self._on_hard_limit, member, job))

    def _on_terminal(self, member: Member, job: Job, end: Terminal) -> None:
        member.jobs.pop(job.execution_id, None)
        self._on_end(job)
        if isinstance(end, Traced) and job.stage is not Stage.OVER:
            if end.escaped:
                self._wear_out(member, "a task tried to end the process")
            if job.signum is not None and end.escaped:
                self._outcomes.lose(job, end, None)
            else:
                self._losses.forget_here(job.call)
                self._outcomes.end(job, partial(job.say_traced, end), ending_of_traced(end))
        elif job.stage is not Stage.OVER:
            status = member.session.exit_status
            if status is not None:
                # It may have begun, unheard: a message that is acknowledged early must not return.
                self._accept(member, job, time.monotonic())
            self._outcomes.lose(job, end, status)
        self._after_job(member)

    def _after_job(self, member: Member) -> None:
        self._check_memory(member)
        if member.worn:
            self._let_go_if_done(member)
            return
        is_there = member.session.is_alive and member in self.members[member.kind]
        if is_there:
            self.barren = 0
        if member.kind == "blocking" and is_there:
            self._free.append(member)
        self._dispatch(member.kind)

    def _on_soft_limit(self, member: Member, job: Job) -> None:
        if job.stage is Stage.ACCEPTED and member.session.soft_limit(job.execution_id):
            self._bridge.put(job.say_soft_limit)

    def _on_hard_limit(self, member: Member, job: Job) -> None:
        if job.stage is not Stage.ACCEPTED:
            return
        self.totals["hard_limits"] += 1
        job.is_over_limit = True  # told once it is stopped: it may come to its end before
        if member.kind == "async":
            self._spawn(member.session.cancel(job.execution_id, _ASYNC_GRACE_S))
        elif job.signum is not None:  # it was asked to leave before
            self._kill(member)
        else:
            member.worn = member.worn or "a task met its hard limit"
            member.session.signal(signal.SIGTERM)
            asyncio.get_running_loop().call_later(_TIDY_S, self._kill, member)

    def _on_state(self, member: Member, _old: SessionState, _new: SessionState) -> None:
        """The child has ended; its jobs have heard so already."""
        if self._stopped or member not in self.members[member.kind]:
            return
        self._remove(member)
        self.totals["children_lost"] += not member.worn
        self.barren += not member.worn and not member.taken
        self._pool.retire(member.session)
        self._balance(member.kind)

    def _on_heartbeat(self, member: Member, heartbeat: Heartbeat) -> None:
        self._judge_memory(member, heartbeat.rss_bytes)

    def _kill(self, member: Member) -> None:
        """The whole family, at once; the job in hand has been told, or will be."""
        member.worn = member.worn or "it was killed"
        self._spawn(member.session.terminate())

    def _member_of(self, job: Job) -> Member | None:
        for members in self.members.values():
            for member in members:
                if member.jobs.get(job.execution_id) is job:
                    return member
        return None

    def _check_memory(self, member: Member) -> None:
        if self._limits.max_rss_bytes is not None and member.session.is_alive:
            self._judge_memory(member, resident_bytes(member.pid))

    def _judge_memory(self, member: Member, rss_bytes: int) -> None:
        most = self._limits.max_rss_bytes
        if most is not None and rss_bytes > most and not member.worn:
            self._wear_out(member, f"it uses {rss_bytes} bytes of memory, and may use {most}")
            log.warning("session %s is replaced: %s", member.session.session_id, member.worn)
            self._let_go_if_done(member)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _end_input(session: Session, execution_id: str, request_id: str) -> None:
    with contextlib.suppress(CapsuleError):  # it has ended, or its child has
        await session.input_response("", request_id=request_id, execution_id=execution_id, eof=True)
