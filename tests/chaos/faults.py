"""The faults of a storm on a session. Each is a coroutine function that takes a `Round`."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from capsule_tasks.errors import (
    SessionLost,
    SessionStartFailed,
    SessionStateError,
    SnapshotError,
    UnknownInputRequest,
)
from capsule_tasks.protocol.messages import InputRequest
from capsule_tasks.sessions import Session
from tests.chaos import workloads
from tests.chaos.recorder import Recorder
from tests.chaos.witness import Manner, Witness

ALLOWED = (
    SessionLost,
    SessionStartFailed,
    SessionStateError,
    SnapshotError,
    TimeoutError,
    UnknownInputRequest,
)
"""How a call may fail when its session breaks meanwhile; CancelledError is not among them."""

MANNERS: tuple[Manner, ...] = ("read", "read", "dawdle", "pause", "close", "drop")


class Round:
    """One fault on one session, with everything that was started for it."""

    def __init__(self, recorder: Recorder, rng: random.Random, name: str) -> None:
        self.recorder = recorder
        self.session: Session = recorder.session
        self.rng = rng
        self.name = name
        self.is_harmful = False
        """Whether the child may have been hurt in a way that shows only later."""
        self.witnesses: list[Witness] = []
        self.calls: list[asyncio.Task[Any]] = []
        self._cancelled: set[asyncio.Task[Any]] = set()

    def execute(self, source: str, manner: Manner | None = None, **options: Any) -> Witness:
        execution_id = options.pop("execution_id", f"{self.name}/{len(self.witnesses)}")
        manner = manner or self.rng.choice(MANNERS)
        self.is_harmful |= source in workloads.HARMFUL
        options.setdefault("on_busy", self.rng.choice(("refuse", "wait")))
        witness = Witness(self.recorder, self.rng, execution_id, source, manner, **options)
        self.witnesses.append(witness)
        return witness

    def busy(self) -> Witness:
        """Something endless that the first signal stops, perhaps with neighbours."""
        name = self.rng.choice(list(workloads.STOPPABLE))
        if name in workloads.COROUTINES:
            for _ in range(self.rng.randrange(3)):
                neighbour = self.rng.choice(workloads.COROUTINES)
                self.execute(workloads.STOPPABLE[neighbour])
        return self.execute(workloads.STOPPABLE[name])

    def call(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a call on the session; `finished` looks at how it ended."""
        task = asyncio.create_task(work, name=f"{self.name} {work.__qualname__}")
        self.recorder.note(task.get_name())
        self.calls.append(task)
        return task

    def cancel_call(self, task: asyncio.Task[Any]) -> None:
        self.recorder.note(f"cancelled: {task.get_name()}")
        self._cancelled.add(task)
        task.cancel()

    def signal_child(self, signum: int) -> None:
        pid = self.session.info.pid
        self.is_harmful = True
        self.recorder.note(f"signal {signum} to {pid}")
        if pid is not None:
            try:
                os.kill(pid, signum)
            except ProcessLookupError:
                self.recorder.note("it is gone already")

    async def moment(self, witness: Witness | None = None) -> None:
        """Let some time pass: nothing, a few turns of the loop, milliseconds, or until a sign."""
        kind = self.rng.randrange(5)
        if kind == 1:
            for _ in range(self.rng.randrange(25)):
                await asyncio.sleep(0)
        elif kind == 2:
            await asyncio.sleep(self.rng.random() * 0.04)
        elif kind > 2 and witness is not None:
            sign = witness.acked if kind == 3 else witness.spoke
            await asyncio.wait({asyncio.ensure_future(sign.wait())}, timeout=0.3)

    async def stop_all(self) -> None:
        """End what would never end by itself, one way or another."""
        for witness in self.witnesses:
            if not witness.task.done():
                self.call(self.session.cancel(witness.execution_id, self.rng.choice((0.05, 0.3))))

    async def finished(self) -> None:
        """Every call and every execution is over, each in a way that it may end."""
        for task in self.calls:
            await asyncio.wait({task})
            if task.cancelled():
                assert task in self._cancelled, f"{task.get_name()}: nothing cancelled it"
            elif task.exception() is not None and not isinstance(task.exception(), ALLOWED):
                raise AssertionError(f"{task.get_name()} failed") from task.exception()
        for witness in self.witnesses:
            await witness.ended()


Fault = Callable[[Round], Awaitable[None]]


async def child_is_killed(round_: Round) -> None:
    await round_.moment(round_.busy())
    round_.signal_child(signal.SIGKILL)


async def child_is_killed_at_rest(round_: Round) -> None:
    round_.signal_child(signal.SIGKILL)
    await round_.moment()
    round_.execute("1", manner="read")


async def child_stands_still_for_a_while(round_: Round) -> None:
    await round_.moment(round_.busy())
    round_.signal_child(signal.SIGSTOP)
    round_.execute("3", on_busy="wait")
    await round_.moment()
    round_.signal_child(signal.SIGCONT)


async def child_stands_still_and_is_stopped(round_: Round) -> None:
    witness = round_.busy()
    await round_.moment(witness)
    round_.signal_child(signal.SIGSTOP)
    await round_.moment()
    session = round_.session
    end = round_.rng.choice((session.terminate, session.shutdown, session.restart, None))
    round_.call(end() if end is not None else session.cancel(witness.execution_id, 0.05))


async def code_takes_its_child_along(round_: Round) -> None:
    await round_.moment(round_.execute(round_.rng.choice(list(workloads.DEADLY.values()))))
    round_.execute("4")


async def code_damages_its_session(round_: Round) -> None:
    source = round_.rng.choice(list(workloads.DAMAGING.values()))
    await round_.moment(round_.execute(source))
    await round_.moment(round_.busy())


async def code_leaves_a_family(round_: Round) -> None:
    witness = round_.execute(round_.rng.choice(list(workloads.FAMILY.values())), manner="read")
    if round_.rng.random() < 0.7:
        await asyncio.wait({witness.task}, timeout=1.0)
    session = round_.session
    end = round_.rng.choice((session.terminate, session.shutdown, session.restart, None))
    if end is None:
        round_.signal_child(signal.SIGKILL)
    else:
        round_.call(end())


async def callers_are_cancelled(round_: Round) -> None:
    witness = round_.busy()
    await round_.moment(witness)
    witness.cancel()
    await round_.moment()
    if round_.rng.random() < 0.5:
        witness.cancel()


async def consumers_leave(round_: Round) -> None:
    names = ("flood", "stderr", "raw", "await flood", "threads", "finally")
    source = workloads.STOPPABLE[round_.rng.choice(names)]
    await round_.moment(round_.execute(source, round_.rng.choice(("close", "drop"))))


async def cancels_come_at_any_moment(round_: Round) -> None:
    session, rng = round_.session, round_.rng
    if rng.random() < 0.3:
        round_.call(session.cancel(f"{round_.name}/0"))
        await round_.moment()
    witness = round_.busy()
    await round_.moment(witness)
    for _ in range(rng.randrange(1, 4)):
        round_.call(session.cancel(witness.execution_id, rng.choice((0.0, 0.001, 0.1, 2.0))))
        await round_.moment()
    if rng.random() < 0.3:
        round_.cancel_call(round_.calls[-1])


async def short_code_is_cancelled_as_it_ends(round_: Round) -> None:
    for _ in range(round_.rng.randrange(1, 6)):
        source = round_.rng.choice(list(workloads.FINITE.values()))
        witness = round_.execute(source, "read")
        await round_.moment(witness)
        round_.call(round_.session.cancel(witness.execution_id, 5.0))


async def interrupts_come_at_any_moment(round_: Round) -> None:
    witness = round_.busy()
    await round_.moment(witness)
    for _ in range(round_.rng.randrange(1, 3)):
        force = round_.rng.random() < 0.3
        round_.call(round_.session.interrupt(force_restart=force))
        await round_.moment()


async def time_runs_out(round_: Round) -> None:
    kinds = {**workloads.STOPPABLE, **workloads.FINITE, **workloads.STUBBORN}
    for _ in range(round_.rng.randrange(1, 3)):
        source = round_.rng.choice(list(kinds.values()))
        round_.execute(source, timeout_s=round_.rng.random() * 0.1, on_busy="wait")
        await round_.moment()


async def session_is_ended_while_busy(round_: Round) -> None:
    session, rng = round_.session, round_.rng
    await round_.moment(round_.busy())
    for _ in range(rng.randrange(1, 4)):
        round_.call(rng.choice((session.shutdown, session.terminate, session.restart))())
        await round_.moment()
    if rng.random() < 0.3:
        round_.cancel_call(rng.choice(round_.calls))


async def start_is_disturbed(round_: Round) -> None:
    session, rng = round_.session, round_.rng
    round_.call(session.restart())
    for _ in range(rng.randrange(1, 4)):
        await round_.moment()
        choice = rng.randrange(6)
        if choice < 3:
            round_.call((session.shutdown, session.terminate, session.restart)[choice]())
        elif choice == 3:
            round_.signal_child(rng.choice((signal.SIGKILL, signal.SIGTERM)))
        elif choice == 4:
            round_.cancel_call(rng.choice(round_.calls))
        else:
            round_.execute("5")


async def stubborn_code_is_stopped(round_: Round) -> None:
    session, rng = round_.session, round_.rng
    name = rng.choice(list(workloads.STUBBORN))
    if name.startswith("await"):
        for neighbour in rng.sample(workloads.COROUTINES, rng.randrange(3)):
            round_.execute(workloads.STOPPABLE[neighbour])
        if rng.random() < 0.3:
            round_.execute(workloads.STUBBORN["await ignores"])
    witness = round_.execute(workloads.STUBBORN[name], on_busy="wait")
    await round_.moment(witness)
    round_.call(session.cancel(witness.execution_id, 0.05))
    if rng.random() < 0.4:
        await asyncio.sleep(rng.random() * 0.2)
        round_.call(rng.choice((session.shutdown, session.terminate, session.restart))())


async def input_is_answered_badly(round_: Round) -> None:
    session, rng = round_.session, round_.rng
    source = workloads.STOPPABLE[rng.choice(("input", "await input"))]
    witness = round_.execute(source, "read")
    await asyncio.wait({asyncio.ensure_future(witness.acked.wait())}, timeout=1.0)
    await asyncio.sleep(rng.random() * 0.05)
    asked = [m.id for m in witness.messages if isinstance(m, InputRequest)]
    for request_id in ["not asked", *asked * rng.randrange(3)]:
        answer = session.input_response(
            "text", request_id=request_id, execution_id=witness.execution_id, eof=rng.random() < 0.3
        )
        round_.call(answer)
    if rng.random() < 0.5:
        round_.signal_child(signal.SIGKILL)


async def questions_meet_the_end(round_: Round) -> None:
    session, rng = round_.session, round_.rng
    if rng.random() < 0.6:
        await round_.moment(round_.busy())
    questions = [
        session.stack(),
        session.namespace_summary(1.0),
        session.checkpoint(1.0),
        session.restore(b"no snapshot", timeout_s=1.0),
        session.receive_message(0.1),
        session.receive_message(0.2),
    ]
    rng.shuffle(questions)
    tasks = [round_.call(question) for question in questions]
    await round_.moment()
    for task in rng.sample(tasks, 2):
        round_.cancel_call(task)
    if rng.random() < 0.5:
        round_.signal_child(signal.SIGKILL)


async def many_are_sent_at_once(round_: Round) -> None:
    kinds = {**workloads.FINITE, **workloads.STOPPABLE}
    for _ in range(round_.rng.randrange(3, 9)):
        round_.execute(round_.rng.choice(list(kinds.values())))
    await round_.moment()
    if round_.rng.random() < 0.5:
        round_.rng.choice(round_.witnesses).cancel()


FAULTS: tuple[Fault, ...] = (
    child_is_killed,
    child_is_killed_at_rest,
    child_stands_still_for_a_while,
    child_stands_still_and_is_stopped,
    code_takes_its_child_along,
    code_damages_its_session,
    code_leaves_a_family,
    callers_are_cancelled,
    consumers_leave,
    cancels_come_at_any_moment,
    short_code_is_cancelled_as_it_ends,
    interrupts_come_at_any_moment,
    time_runs_out,
    session_is_ended_while_busy,
    start_is_disturbed,
    stubborn_code_is_stopped,
    input_is_answered_badly,
    questions_meet_the_end,
    many_are_sent_at_once,
)
