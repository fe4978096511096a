"""Workers on one queue, and what is done to them and to their Redis."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import redis

from capsule_tasks.testing.servers import PrivateServer
from tests.acceptance.workers import Worker, close, eventually, is_running, unique

VISIBILITY_S = 7
"""Longer than a worker's claim to send the body of a chord lasts in Celery."""
_OWN_NAME = "the-test"


class Fleet:
    """A constant number of workers; one that exits is replaced."""

    def __init__(
        self,
        directory: Path,
        rng: random.Random,
        *options: str,
        size: int = 2,
        app: str = "tests.acceptance.app",
        **environment: str,
    ) -> None:
        """`options` and `environment` are those of each worker."""
        self._directory = directory
        self._rng = rng
        self._options = options
        self._size = size
        self._app = app
        self._environment = environment
        self._server = PrivateServer(directory / "redis", aof=True)
        self.queue = unique("q")
        self.workers: list[Worker] = []
        self.done: Counter[str] = Counter()

    def __enter__(self) -> Self:
        self._server.start()
        self._port = self._server.port
        self.url = self._server.url
        self.admin = redis.Redis.from_url(self.url, client_name=_OWN_NAME)
        for _ in range(self._size):
            self.hire()
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.__exit__()
        self.admin.close()
        self._server.stop()

    def storm(self) -> Callable[[], None]:
        """One of the faults, each of them in turn before any is repeated."""
        faults = [
            self.kill_a_child,
            self.stop_a_child,
            self.stop_a_worker,
            self.kill_a_worker,
            self.replace_a_worker,
            self.cut_connections,
            self.restart_redis,
        ]
        rarest = min(self.done[fault.__name__] for fault in faults)
        fault = self._rng.choice([f for f in faults if self.done[f.__name__] == rarest])
        self.done[fault.__name__] += 1
        return fault

    # --- faults --------------------------------------------------------------------------------

    def kill_a_child(self) -> None:
        if child := self._child():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)

    def stop_a_child(self) -> None:
        if child := self._child():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGSTOP)
                time.sleep(self._rng.uniform(0.1, 1))
                os.kill(child, signal.SIGCONT)

    def stop_a_worker(self) -> None:
        """Sometimes for longer than its messages are waited for."""
        worker = self._rng.choice(self.workers)
        os.kill(worker.pid, signal.SIGSTOP)
        time.sleep(self._rng.choice([0.2, 1, VISIBILITY_S + 1]))
        os.kill(worker.pid, signal.SIGCONT)

    def kill_a_worker(self) -> None:
        self.kill(self._rng.choice(self.workers))

    def kill(self, worker: Worker) -> None:
        self.lose(worker)
        self.hire()

    def lose(self, worker: Worker) -> None:
        """Kill a worker without replacing it."""
        self._hold_still(worker)
        worker.kill()
        self._remove(worker)

    def replace_a_worker(self) -> None:
        """As a deployment does: asked to leave, it finishes what it runs."""
        self.replace(self._rng.choice(self.workers))

    def replace(self, worker: Worker) -> None:
        worker.stop()
        self._remove(worker)
        self.hire()

    def cut_connections(self) -> None:
        """Cut all connections at once, also those of children and of the caller, in mid-call."""
        with self._all_still():
            for client in self.admin.client_list():
                if client["name"] != _OWN_NAME:
                    with contextlib.suppress(redis.ResponseError):  # it has gone by itself
                        self.admin.client_kill_filter(_id=client["id"])

    def restart_redis(self) -> None:
        with self._all_still():
            self._server.stop()
            self._server = PrivateServer(self._directory / "redis", port=self._port, aof=True)
            self._server.start()

    # --- looking -------------------------------------------------------------------------------

    def waiting(self) -> int:
        return int(self.admin.llen(self.queue))

    def held(self) -> int:
        return int(self.admin.hlen("unacked"))

    def processes(self) -> list[int]:
        """Every process that was started for this fleet, however distant a descendant."""
        mark = f"TEST_QUEUE={self.queue}".encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
        return [pid for pid in found if is_running(pid)]

    def logs(self) -> str:
        """The logs of all workers, also of those that have exited."""
        return "\n\n".join(
            f"{path.name}\n{path.read_text(errors='replace')}"
            for path in self._directory.glob("*.log")
        )

    @property
    def kills(self) -> int:
        """How many children have been killed, with their workers or alone."""
        return self.done["kill_a_child"] + 2 * self.done["kill_a_worker"]

    @property
    def holds(self) -> int:
        """How often children were held up in the middle of something, or cut off from Redis."""
        names = ("stop_a_child", "stop_a_worker", "cut_connections", "restart_redis")
        return sum(self.done[name] for name in names)

    def _child(self) -> int | None:
        worker = self._rng.choice(self.workers)
        children = Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()
        return int(self._rng.choice(children)) if children else None

    def _hold_still(self, worker: Worker) -> None:
        """Stop a worker while Redis has nothing on the way to it.

        Kombu takes a message off the queue and notes that it is held in two steps. What is between
        them is lost with the worker, the connection or the server, whatever the pool; this is not
        about that.
        """

        def is_still() -> bool:
            os.kill(worker.pid, signal.SIGSTOP)
            waiting = [
                client["id"]
                for client in self.admin.client_list()
                if client["name"] == worker.name.partition("@")[0]
                and client["cmd"] == "brpop"
                and "b" in client["flags"]
            ]
            if waiting and all(self.admin.client_unblock(one) for one in waiting):
                return True
            os.kill(worker.pid, signal.SIGCONT)
            return False

        eventually(is_still, f"a moment in which {worker.name} waits for work")

    @contextlib.contextmanager
    def _all_still(self) -> Iterator[None]:
        for worker in self.workers:
            self._hold_still(worker)
        yield
        for worker in self.workers:
            os.kill(worker.pid, signal.SIGCONT)

    def hire(self) -> None:
        """Start one more worker; it is ready then."""
        worker = Worker(
            self.url,
            self._directory,
            *self._options,
            queue=self.queue,
            app=self._app,
            TEST_VISIBILITY=str(VISIBILITY_S),
            TEST_LOSS_LIMIT="1000",
            **self._environment,
        )
        worker.environment["TEST_CLIENT_NAME"] = worker.name.partition("@")[0]
        worker.__enter__()
        self.workers.append(worker)

    def _remove(self, worker: Worker) -> None:
        self.workers.remove(worker)
        close(worker.app)

    def leave(self) -> None:
        """Ask all workers to stop, and wait until they have."""
        for worker in self.workers:
            assert worker.stop() == 0, worker.log[-5000:]
        eventually(lambda: not self.processes(), f"the end of {self.processes()}")


def all_acknowledged(fleet: Fleet) -> Any:
    """Nothing waits and nothing is held any more."""
    return eventually(lambda: not fleet.waiting() and not fleet.held(), "the last acknowledgement")
