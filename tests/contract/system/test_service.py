"""The contract of services that are threads: `capsule_tasks.system.service`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from celery import Celery
from kombu import Connection

from capsule_tasks.client.watching.watch_thread import _LoopThread
from capsule_tasks.system.service import ThreadService
from capsule_tasks.taskpool.hub import Bridge, RuntimeThread
from capsule_tasks.taskpool.reporting.output_log import OutputLog
from capsule_tasks.taskpool.shutdown_watchdog import ShutdownWatchdog
from capsule_tasks.taskpool.stock_redis.kept_revokes import Revokes
from capsule_tasks.taskpool.stock_redis.visibility import VisibilityRenewal
from tests.servers import fresh_prefix
from tests.services import nothing_left

HANG_S = 30
CALLERS = 8
ROUNDS = 20


class Ground:
    """Makes services, which share a Redis."""

    def __init__(self, url: str, stack: ExitStack) -> None:
        self._url = url
        self._stack = stack

    def revokes(self) -> Revokes:
        app = Celery("services", broker="memory://", set_as_current=False)
        app.conf.update(capsule_redis_url=self._url, capsule_prefix=fresh_prefix())
        self._stack.callback(app.close)
        return Revokes(app, None, lambda _channel, _ring: None, poll_s=0.001)

    def holding(self) -> VisibilityRenewal:
        options = {"visibility_timeout": 1}
        connection = self._stack.enter_context(Connection(self._url, transport_options=options))
        channel = connection.default_channel
        consumer = SimpleNamespace(
            connection=connection, hub=None, task_consumer=SimpleNamespace(channel=channel)
        )
        service = VisibilityRenewal(consumer)
        service.prepare(connection)
        return service

    def output_log(self) -> OutputLog:
        return OutputLog(Celery("services", set_as_current=False))

    def bridge(self) -> Bridge:
        return Bridge()

    def runtime(self) -> RuntimeThread:
        return RuntimeThread()

    def client(self) -> ThreadService:
        return _LoopThread()

    def leaving(self) -> ShutdownWatchdog:
        return ShutdownWatchdog(HANG_S, lambda: False, lambda: True)


KINDS = [name for name in vars(Ground) if not name.startswith("_")]
Make = Callable[[], ThreadService]


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest, valkey_url: str) -> Iterator[Make]:
    """Makes services of one kind, of which nothing is left when the test is over."""
    made: list[ThreadService] = []
    with nothing_left(valkey_url), ExitStack() as stack:
        ground = Ground(valkey_url, stack)

        def maker() -> ThreadService:
            made.append(getattr(ground, request.param)())
            return made[-1]

        yield maker
        assert not any(is_running(service) for service in made)


def is_running(service: ThreadService) -> bool:
    return service._thread is not None and service._thread.is_alive()


def at_once(*calls: Callable[[], object]) -> None:
    """Each on a thread of its own, all at one moment; what one raises is raised here."""
    barrier = threading.Barrier(len(calls))
    errors: list[BaseException] = []

    def run(call: Callable[[], object]) -> None:
        barrier.wait(HANG_S)
        try:
            call()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,), name="caller") for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_started_twice_and_stopped_twice(make: Make) -> None:
    service = make()
    service.start()
    assert is_running(service)
    thread = service._thread
    service.start()
    assert service._thread is thread
    service.stop()
    assert not is_running(service)
    service.stop()


def test_stopped_before_it_is_started_it_does_not_start_any_more(make: Make) -> None:
    service = make()
    service.stop()
    service.start()
    assert service._thread is None
    service.stop()


def test_stopped_for_good(make: Make) -> None:
    service = make()
    service.start()
    service.stop()
    service.start()
    assert not is_running(service)


def test_each_of_many_threads_that_stop_it_waits_for_the_end(make: Make) -> None:
    service = make()
    service.start()
    running: list[bool] = []

    def stop() -> None:
        service.stop()
        running.append(is_running(service))

    at_once(*[stop] * CALLERS)
    assert running == [False] * CALLERS


def test_stopped_while_it_is_started(make: Make) -> None:
    for _ in range(ROUNDS):
        service = make()
        at_once(service.start, service.stop, service.start, service.stop)
        assert not is_running(service)


def test_stopped_half_way_through_its_start(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller of stop waits until the service has started, and then for its end."""
    service = make()
    stopping = threading.Thread(target=service.stop)

    def set_up() -> None:
        stopping.start()
        own_set_up()

    own_set_up = service.set_up
    monkeypatch.setattr(service, "set_up", set_up)
    service.start()
    stopping.join(HANG_S)
    assert not is_running(service)
    assert not stopping.is_alive()
