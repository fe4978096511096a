"""The loop that the hub and the runtime thread take turns at, without Celery around it."""

from __future__ import annotations

import asyncio
import select
import signal
import socket
import threading
from collections.abc import Iterator

import pytest

from capsule_tasks.child.outbox import Outbox
from capsule_tasks.protocol.codec import MessageDecoder
from capsule_tasks.protocol.messages import Ack, TaskResult, ToParent
from capsule_tasks.taskpool.hub import Bridge, RuntimeThread, SharedLoop
from tests.sessions import HANG_S


@pytest.fixture
def runtime() -> Iterator[RuntimeThread]:
    runtime = RuntimeThread()
    runtime.start()
    yield runtime
    runtime.stop()


@pytest.fixture
def loop() -> Iterator[SharedLoop]:
    loop = SharedLoop()
    yield loop
    loop.close()


def of_runtime(call: threading.Event, names: list[str]) -> None:
    names.append(threading.current_thread().name)
    call.set()


def test_without_a_hub_the_runtime_thread_makes_every_call(runtime: RuntimeThread) -> None:
    made, names = threading.Event(), list[str]()
    runtime.post(of_runtime, made, names)
    assert made.wait(HANG_S)
    assert runtime.start_coroutine(asyncio.sleep(0.001, "slept")).result(HANG_S) == "slept"
    assert names == ["capsule-runtime"]


def test_a_hub_that_is_awake_makes_the_calls_itself(runtime: RuntimeThread) -> None:
    names: list[str] = []
    runtime.attach_hub()
    for _ in range(100):
        runtime.post_with_batch(lambda: names.append(threading.current_thread().name))
        runtime.run_posts()
    assert names == [threading.current_thread().name] * 100


def test_for_a_hub_that_is_away_the_runtime_thread_stands_in(runtime: RuntimeThread) -> None:
    runtime.attach_hub()
    for _ in range(3):
        made, names = threading.Event(), list[str]()
        runtime.post(of_runtime, made, names)
        assert made.wait(HANG_S)  # the hub does not run here
        assert names == ["capsule-runtime"]
        runtime.run_once()  # it is back, and goes away again


def test_timers_need_no_hub_also_those_that_it_sets(runtime: RuntimeThread) -> None:
    """The runtime thread sleeps until the next timer that it knows of: a sooner one wakes it."""
    rung, names = threading.Event(), list[str]()
    runtime.attach_hub()
    runtime.post_with_batch(
        lambda: asyncio.get_running_loop().call_later(0.01, of_runtime, rung, names)
    )
    runtime.run_posts()
    assert rung.wait(HANG_S)


def test_a_call_that_plans_another_has_it_made(runtime: RuntimeThread) -> None:
    made, names = threading.Event(), list[str]()
    runtime.attach_hub()
    runtime.post_with_batch(lambda: asyncio.get_running_loop().call_soon(of_runtime, made, names))
    runtime.run_posts()
    assert select.select([runtime], [], [], HANG_S)[0]
    runtime.run_once()
    assert made.wait(HANG_S)


def test_tasks_still_running_at_the_end_are_cancelled(runtime: RuntimeThread) -> None:
    cancelled = threading.Event()
    begun = threading.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    runtime.start_coroutine(work())
    assert begun.wait(HANG_S)
    runtime.stop()
    assert cancelled.is_set()
    runtime.stop()


def test_a_signal_waits_for_the_end_of_the_turn(loop: SharedLoop) -> None:
    """Its handler may sleep, or turn the loop: neither may happen inside of a turn."""
    heard: list[str] = []

    def handle(*_: object) -> None:
        loop.asyncio_loop.call_soon(heard.append, "turned by the handler")
        loop.run_once()

    def interrupted() -> None:
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        heard.append("the rest of the call")

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        loop.asyncio_loop.call_soon(interrupted)
        loop.run_once()
        loop.call_now(interrupted)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert heard == ["the rest of the call", "turned by the handler"] * 2
    assert signal.SIGUSR1 not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_turn_ends_though_there_is_always_more_to_do(loop: SharedLoop) -> None:
    turns = 0

    def again() -> None:
        nonlocal turns
        turns += 1
        loop.asyncio_loop.call_soon(again)

    loop.asyncio_loop.call_soon(again)
    loop.run_once()
    assert turns >= 1
    assert loop.due_at <= loop.asyncio_loop.time()  # it says that it has to be turned again


def test_the_hub_is_not_woken_for_items_it_is_about_to_see() -> None:
    bridge, made, ready = Bridge(), list[int](), list[bool]()

    def work() -> None:
        bridge.put(made.append, 1)
        ready.append(bool(select.select([bridge], [], [], 0)[0]))

    try:
        bridge.run_after(work)
        assert (made, ready) == ([1], [False])
        bridge.put(made.append, 2)
        bridge.wait(HANG_S)
        bridge.drain()
        assert made == [1, 2]
    finally:
        bridge.stop()


def test_calls_of_work_that_ends_the_worker_wake_the_hub_once_more() -> None:
    bridge, made = Bridge(), list[int]()

    def work() -> None:
        bridge.put(made.append, 1)
        raise SystemExit

    try:
        with pytest.raises(SystemExit):
            bridge.run_after(work)
        assert not made
        bridge.wait(HANG_S)
        bridge.drain()
        assert made == [1]
    finally:
        bridge.stop()
    bridge.stop()


def test_an_acknowledgement_waits_for_the_next_message_or_its_deadline() -> None:
    ours, theirs = socket.socketpair()
    decoder: MessageDecoder[object] = MessageDecoder(ToParent, 10_000)

    def read() -> list[str]:
        return [type(message).__name__ for message in decoder.feed(ours.recv(10_000))]

    def ack() -> Ack:
        return Ack(ack_of="1", execution_id="1", accepted_at=0.0)

    with ours, theirs:
        outbox = Outbox(theirs, theirs, 10_000, 0.001)
        outbox.bulk(ack(), deferred_until=float("inf"))
        assert not select.select([ours], [], [], 0)[0]
        outbox.bulk(TaskResult(execution_id="1"))
        assert read() == ["Ack", "TaskResult"]
        outbox.bulk(ack(), deferred_until=float("inf"))
        outbox.flush_deferred_soon()
        outbox.pump.start()
        assert read() == ["Ack"]
        outbox.bulk(ack(), deferred_until=0.0)  # its deadline has passed already
        assert read() == ["Ack"]
        outbox.flush_deferred_soon()
        assert not select.select([ours], [], [], 0.01)[0]
