"""A real `celery worker` process, and a producer that shares nothing with it but Redis."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Self

from celery import Celery
from celery.result import AsyncResult
from redis import RedisError

from capsule_tasks.client import Execution

ROOT = Path(__file__).parent.parent.parent
HANG_S = 60.0
"""Nothing takes this long unless it hangs."""
POOLS = {"capsule": "capsule_tasks.taskpool:TaskPool", "prefork": "prefork"}


class Worker:
    """Started when it is entered, and ready then; killed, if it has not ended, when it is left."""

    def __init__(
        self,
        url: str,
        directory: Path,
        *options: str,
        pool: str = "capsule",
        concurrency: int = 2,
        queue: str | None = None,
        app: str = "tests.acceptance.app",
        script: bool = False,
        stdout: int | None = None,
        **environment: str,
    ) -> None:
        self.queue = queue or f"q-{uuid.uuid4().hex[:8]}"
        self.is_prefork = pool == "prefork"
        self.name = f"w-{uuid.uuid4().hex[:8]}@test"
        self.log_file = directory / f"{self.name}.log"
        self.app = producer(url, self.queue)
        self._options = ("-c", str(concurrency), *options)
        self._module = app
        self._stdout = stdout
        # Celery starts itself again by `sys.argv`, which needs its script and not `-m`.
        start = [str(Path(sys.executable).parent / "celery")]
        self._celery = start if script else [sys.executable, "-m", "celery"]
        self.environment = {
            **os.environ,
            "REDIS_URL": url,
            "TEST_QUEUE": self.queue,
            "TEST_POOL": POOLS[pool],
            "PYTHONUNBUFFERED": "1",
            "C_FORCE_ROOT": "1",  # the app takes pickles, to show that any serializer goes
            **environment,
        }
        self.process: subprocess.Popen[bytes] | None = None
        self._listens = False

    def __enter__(self) -> Self:
        self.start()
        return self

    def start(self) -> None:
        """Start it, again too; it is ready then."""
        reading = self.launch()
        try:
            ready, _, _ = select.select([reading], [], [], HANG_S)
            assert ready, f"the worker did not become ready:\n{self.log}"
            assert os.read(reading, 64), f"the worker ended:\n{self.log}"
        except BaseException:
            self.kill()
            raise
        finally:
            os.close(reading)

    def launch(self) -> int:
        """Start it without waiting; return the descriptor on which it reports that it is ready."""
        reading, writing = os.pipe()
        command = [*self._celery, "-A", self._module, "worker", "-n", self.name]
        command += ["-l", "INFO", "-Q", self.queue, "--without-mingle", "--without-gossip"]
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *self._options],
                cwd=ROOT,
                env=self.environment | {"TEST_READY_FD": str(writing)},
                pass_fds=(writing,),
                stdin=subprocess.DEVNULL,
                stdout=log if self._stdout is None else self._stdout,
                stderr=log,
                start_new_session=True,
            )
        os.close(writing)
        return reading

    def __exit__(self, *_: object) -> None:
        self.kill()
        close(self.app)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def kill(self) -> None:
        if self.process is not None:
            with contextlib.suppress(OSError):
                self.process.kill()
            self.process.wait()

    def stop(self, signum: int = signal.SIGTERM) -> int:
        """Ask it to leave; its exit status."""
        assert self.process is not None
        self.process.send_signal(signum)
        return self.process.wait(HANG_S)

    def send(self, name: str, *args: Any, **options: Any) -> AsyncResult[Any]:
        """Call a task by its name."""
        return self.sig(name, *args).apply_async(**options)

    def sig(self, name: str, *args: Any, **options: Any) -> Any:
        return self.app.signature(name, args=args, queue=self.queue, **options)

    def get(self, name: str, *args: Any, **options: Any) -> Any:
        """Call a task and wait for its value."""
        return self.send(name, *args, **options).get(timeout=HANG_S)

    def heard(self, mark: str) -> str:
        """Wait until a task has set this mark; return the value it set."""
        found = self.app.backend.client.blpop(f"mark:{mark}", HANG_S)
        assert found is not None, f"no task set the mark {mark!r}:\n{self.log[-5000:]}"
        return str(found[1].decode())

    def go(self, key: str) -> None:
        """Let a task that holds go on."""
        self.app.backend.client.rpush(f"go:{key}", "")

    def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """The reply of this worker to a remote command."""
        for _ in range(5):
            inspect = self.app.control.inspect([self.name], timeout=10, limit=1)
            answers = getattr(inspect, method)(*args, **kwargs)
            if answers:
                return answers[self.name]
        raise AssertionError(f"no answer to {method}:\n{self.log[-5000:]}")

    def listen(self) -> None:
        """Wait until the worker has subscribed to broadcasts: earlier ones are lost."""
        if not self._listens:
            ping = self.app.control.ping
            eventually(lambda: ping(destination=[self.name], timeout=0.5), "an answer to a ping")
            self._listens = True

    def tell(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Tell this worker to do something; its answer."""
        self.listen()
        options = {"destination": [self.name], "reply": True, "timeout": 10, **kwargs}
        (answer,) = getattr(self.app.control, method)(*args, **options)
        return answer[self.name]


class Events:
    """The Celery events of a worker; subscribed when this is made."""

    def __init__(self, worker: Worker, receiver: Any, connection: Any) -> None:
        self._connection = connection
        self._heard: dict[str, list[dict[str, Any]]] = {}
        receiver.handlers["*"] = self._take
        first: list[str] = []
        eventually(lambda: self._first(worker, first), "the first event")

    def _first(self, worker: Worker, sent: list[str]) -> bool:
        """Kombu subscribes when it first reads: earlier events are not received."""
        sent.append(worker.send("add", 1, 1).id)
        self._drain(0.5)
        return any(task_id in self._heard for task_id in sent)

    def of(self, task_id: str, *, until: Collection[str]) -> list[dict[str, Any]]:
        """All events of a task, up to one of these types."""
        heard = self._heard.setdefault(task_id, [])

        def is_over() -> bool:
            self._drain(0.2)
            return any(event["type"] in until for event in heard)

        eventually(is_over, f"one of {until} after {[event['type'] for event in heard]}")
        return heard

    def _take(self, event: dict[str, Any]) -> None:
        if "uuid" in event:
            self._heard.setdefault(event["uuid"], []).append(event)

    def _drain(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            while True:
                self._connection.drain_events(timeout=timeout_s)


@contextlib.contextmanager
def listening(worker: Worker) -> Iterator[Events]:
    """Receive the events of a worker's tasks."""
    with worker.app.connection_for_read() as source:
        receiver = worker.app.events.Receiver(source, handlers={})
        with receiver.consumer_context() as (connection, _, _):
            yield Events(worker, receiver, connection)


def producer(url: str, queue: str, **conf: Any) -> Celery:
    """An app that knows no task, only where to send calls."""
    app = Celery("producer", broker=url, backend=url, set_as_current=False)
    app.conf.update(
        task_default_queue=queue,
        task_create_missing_queues=True,
        # Kombu shares connections by what they are made with: these are closed with the app.
        broker_transport_options={"of": unique()},
        **conf,
    )
    say_good_bye = app.backend.remove_pending_result

    def quietly(result: Any) -> Any:
        """A result without a waiter may be dropped after the server has gone."""
        with contextlib.suppress(Exception):
            say_good_bye(result)
        return result

    app.backend.remove_pending_result = quietly
    return app


def close(app: Celery) -> None:
    """Its connections too: an app leaves those of its result backend to the collector."""
    backend = app.backend
    # Results that the collector finds later would connect once more to say good-bye.
    backend.remove_pending_result = lambda result: result
    with contextlib.suppress(RedisError):
        backend.result_consumer.stop()
    backend.client.connection_pool.disconnect()
    app.pool.force_close_all()
    app.close()


def ended(*results: AsyncResult[Any]) -> None:
    """Wait until each has its end in its stream, a moment after its result is stored."""

    def is_over(execution: Execution) -> bool:
        snapshot = execution.snapshot()
        return snapshot.state == "ended" and bool(snapshot.task)

    for result in results:
        execution = Execution.of(result)
        eventually(lambda one=execution: is_over(one), "its end in the stream")


def unique(prefix: str = "k") -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


def eventually(condition: Any, what: str = "it") -> Any:
    """Poll `condition`, which gives no signal, and return its first true value."""
    deadline = time.monotonic() + HANG_S
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError(f"{what} did not come about")


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (OSError, IndexError):
        return False
