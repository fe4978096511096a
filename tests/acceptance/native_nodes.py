"""Nodes for pytest-celery that are processes of this machine: what it asks of Docker, without it.

pytest-celery's nodes talk to a container; these have the same methods over a
`PrivateServer` and over a worker of `tests/acceptance/workers.py`.
"""

from __future__ import annotations

import signal as signals
from typing import Any

from pytest_celery import CeleryTestWorker, RedisTestBackend, RedisTestBroker

from capsule_tasks.testing.servers import PrivateServer
from tests.acceptance.workers import Worker


class NativeServer:
    """In the place of a Redis container; it comes back with its data, at its old address."""

    def __init__(self, server: PrivateServer) -> None:
        self._server = server
        self.name = self.id = f"redis-{server.port}"
        self.celeryconfig = {"url": server.url, "host_url": server.url}

    @property
    def status(self) -> str:
        return "running" if self._server.running is not None else "exited"

    def ready(self) -> bool:
        return self.status == "running"

    def kill(self, signal: Any = "SIGKILL") -> None:
        self._server.stop()

    def restart(self, timeout: float) -> None:
        self._server.stop()
        self._server.start()

    def reload(self) -> None:
        """The state is asked for again each time."""

    def teardown(self) -> None:
        self._server.stop()


class NativeWorkerProcess:
    """In the place of a worker's container."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.name = self.id = worker.name

    @property
    def status(self) -> str:
        process = self._worker.process
        return "running" if process is not None and process.poll() is None else "exited"

    def worker_name(self) -> str:
        return self._worker.name

    def worker_queue(self) -> str:
        return self._worker.queue

    def ready(self) -> bool:
        return self.status == "running"

    def logs(self) -> str:
        return self._worker.log

    def kill(self, signal: Any = "SIGKILL") -> None:
        number = signals.Signals[signal] if isinstance(signal, str) else signal
        self._worker.stop(number)

    def restart(self, timeout: float) -> None:
        if self.status == "running":
            self._worker.stop()
        self._worker.start()

    def reload(self) -> None:
        """The state is asked for again each time."""

    def teardown(self) -> None:
        self._worker.kill()


class NativeBroker(RedisTestBroker):
    """pytest-celery's broker over a native server."""


class NativeBackend(RedisTestBackend):
    """pytest-celery's result backend over a native server."""


class NativeWorker(CeleryTestWorker):
    """pytest-celery's worker over a native process."""

    def hostname(self) -> str:
        return self.worker_name
