"""The app of the acceptance tests: an ordinary Celery app, that knows nothing of its pool."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from celery import Celery, Task, chain, signals
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded
from celery.worker.request import Request
from redis.exceptions import ConnectionError  # noqa: A004 - Redis's own

REDIS_URL = os.environ.get("REDIS_URL", "redis://localhost")

app = Celery("tests.acceptance.app", broker=REDIS_URL, backend=REDIS_URL)
app.conf.update(
    worker_pool=os.environ.get("TEST_POOL", "capsule_tasks.taskpool:TaskPool"),
    task_default_queue=os.environ.get("TEST_QUEUE", "celery"),
    broker_connection_retry_on_startup=True,
    worker_send_task_events=True,
    result_extended=True,
    broker_transport_options={
        "visibility_timeout": int(os.environ.get("TEST_VISIBILITY", "3600")),
        "unacked_restore_interval": 0.2,  # kombu looks at every tenth of these
        "global_keyprefix": os.environ.get("TEST_KEY_PREFIX", ""),
        "client_name": os.environ.get("TEST_CLIENT_NAME"),
    },
    result_backend_always_retry=bool(os.environ.get("TEST_ALL_LATE")),
    task_acks_late=bool(os.environ.get("TEST_ALL_LATE")),
    task_reject_on_worker_lost=bool(os.environ.get("TEST_ALL_LATE")),
    task_publish_retry_policy={"max_retries": 60, "interval_max": 0.5},
    capsule_start=os.environ.get("TEST_START", "fork"),
    worker_pool_restarts=True,
    accept_content=["json", "msgpack", "yaml", "pickle"],
    capsule_loss_limit=int(os.environ.get("TEST_LOSS_LIMIT", "5")),
    capsule_ready_s=float(os.environ.get("TEST_READY_S", "60")),
    made_in_code="by the worker",
    worker_soft_shutdown_timeout=float(os.environ.get("TEST_SOFT_S", "0")),
)
log = logging.getLogger("tests.acceptance.app")


class OwnError(Exception):
    """Its constructor takes other arguments than the exception keeps."""

    def __init__(self, code: int, *, hint: str) -> None:
        super().__init__(f"code {code}", hint)
        self.code = code


def mark(name: str, value: Any = "") -> None:
    """Say something to the test that waits for it."""
    app.backend.client.rpush(f"mark:{name}", str(value))


@signals.worker_ready.connect
def tell_ready(**_: Any) -> None:
    # Once: a worker that starts itself again has another file behind that number.
    if descriptor := os.environ.pop("TEST_READY_FD", None):
        os.write(int(descriptor), b"ready\n")


@signals.worker_process_init.connect
def tell_process_init(**_: Any) -> None:
    if (gate := os.environ.get("TEST_GATE")) and Path(gate).exists():
        signal.pause()
    print(f"process {os.getpid()} begins")
    if os.environ.get("TEST_MARK_PROCESSES"):
        mark("process_init", os.getpid())


@signals.worker_process_shutdown.connect
def tell_process_shutdown(**_: Any) -> None:
    if os.environ.get("TEST_MARK_PROCESSES"):
        mark("process_shutdown", os.getpid())


@signals.task_prerun.connect
def tell_prerun(sender: Any = None, task_id: str = "", **_: Any) -> None:
    if sender.name == "signalled":
        mark(f"prerun:{task_id}", os.getpid())


@signals.task_postrun.connect
def tell_postrun(sender: Any = None, task_id: str = "", state: str = "", **_: Any) -> None:
    if sender.name == "signalled":
        mark(f"postrun:{task_id}", state)


@app.task(name="add")
def add(x: Any, y: Any) -> Any:
    return x + y


@app.task(name="total")
def total(numbers: list[int]) -> int:
    return sum(numbers)


@app.task(name="told")
def told(key: str) -> str:
    mark(key)
    return "told"


@app.task(name="signalled")
def signalled() -> int:
    return os.getpid()


@app.task(name="fail")
def fail(text: str) -> None:
    raise ValueError(text, 7)


@app.task(name="fail_own")
def fail_own() -> None:
    raise OwnError(3, hint="look")


@app.task(name="fail_chained")
def fail_chained() -> None:
    try:
        {}["absent"]
    except KeyError as cause:
        error = RuntimeError("worse")
        error.add_note("a note")
        raise error from cause


@app.task(name="fail_local")
def fail_local() -> None:
    class Local(Exception):
        pass

    raise Local(threading.Lock())


@app.task(name="retry", bind=True, max_retries=3)
def retry(self: Any, times: int) -> int:
    if self.request.retries < times:
        raise self.retry(countdown=0, exc=ValueError("again"))
    return int(self.request.retries)


@app.task(
    name="autoretry",
    bind=True,
    autoretry_for=(KeyError,),
    retry_backoff=False,
    max_retries=2,
    default_retry_delay=0,
)
def autoretry(self: Any, times: int) -> int:
    if self.request.retries < times:
        raise KeyError("again")
    return int(self.request.retries)


@app.task(name="ignore", bind=True)
def ignore(self: Any) -> None:
    self.update_state(state="OWN", meta={"left": "by me"})
    mark(f"ignored:{self.request.id}")
    raise Ignore


@app.task(name="reject", bind=True, acks_late=True)
def reject(self: Any, key: str) -> str:
    if app.backend.client.incr(key) < 3:
        raise Reject("not now", requeue=True)
    return "done"


@app.task(name="leave")
def leave(code: int) -> None:
    sys.exit(code)


@app.task(name="own_state", bind=True)
def own_state(self: Any, key: str) -> str:
    self.update_state(state="HALF", meta={"done": 1})
    mark(key)
    app.backend.client.blpop(f"go:{key}", 30)
    return "done"


@app.task(name="replace", bind=True)
def replace(self: Any, x: int) -> Any:
    return self.replace(chain(add.s(x, 1), add.s(10)))


@app.task(name="request", bind=True)
def request(self: Any, *_args: Any, **_kwargs: Any) -> dict[str, Any]:
    names = ("id", "retries", "root_id", "parent_id", "is_eager", "correlation_id", "hostname")
    return {name: getattr(self.request, name) for name in names} | {
        "args": list(self.request.args),
        "kwargs": self.request.kwargs,
        "queue": self.request.delivery_info["routing_key"],
    }


@app.task(name="speak")
def speak(word: str) -> int:
    print(f"printed {word}")
    os.system(f"echo from a process {word}")
    log.warning("logged %s", word)
    sys.stderr.write(f"to stderr {word}\n")
    return os.getpid()


@app.task(name="sleep")
def sleep(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


@app.task(name="hold")
def hold(key: str) -> int:
    """Runs until the test says go."""
    mark(key, os.getpid())
    app.backend.client.blpop(f"go:{key}", 30)
    return os.getpid()


@app.task(name="kill_each", acks_late=True, reject_on_worker_lost=True)
def kill_each(key: str) -> None:
    mark(key, os.getpid())
    os.kill(os.getpid(), signal.SIGKILL)


@app.task(name="kill_worker", acks_late=True)
def kill_worker(key: str) -> None:
    """As when the system takes memory back from all that a machine runs."""
    mark(key, os.getpid())
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)


@app.task(name="hold_late", acks_late=True, reject_on_worker_lost=True)
def hold_late(key: str) -> int:
    mark(key, os.getpid())
    app.backend.client.blpop(f"go:{key}", 30)
    return os.getpid()


@app.task(name="told_late", acks_late=True)
def told_late(key: str) -> str:
    mark(key)
    return "told"


@app.task(name="tidy")
def tidy(key: str) -> str:
    try:
        mark(key, os.getpid())
        time.sleep(30)
    except SoftTimeLimitExceeded:
        return "tidied"
    finally:
        mark(f"{key}:finally")
    return "slept"


@app.task(name="lost_once", retry_on_worker_lost=True, max_retries=2, default_retry_delay=0)
def lost_once(key: str) -> int:
    """Celery sends it anew, which costs a retry."""
    if app.backend.client.incr(key) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return int(app.current_task.request.retries)


@app.task(name="lost_always", retry_on_worker_lost=True, max_retries=1, default_retry_delay=0)
def lost_always(key: str) -> None:
    app.backend.client.incr(key)
    os.kill(os.getpid(), signal.SIGKILL)


@app.task(name="stamps", bind=True)
def stamps(self: Any) -> dict[str, Any]:
    return {name: self.request.stamps[name] for name in self.request.stamped_headers or ()}


@app.task(name="limited", rate_limit="60/m")
def limited() -> float:
    return time.time()


class OwnRequest(Request):  # type: ignore[misc]
    """As Celery's guide has it."""

    def on_timeout(self, soft: bool, timeout: float) -> None:
        super().on_timeout(soft, timeout)
        mark(f"on_timeout:{self.id}", "soft" if soft else "hard")

    def on_failure(
        self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False
    ) -> None:
        super().on_failure(exc_info, send_failed_event=send_failed_event, return_ok=return_ok)
        mark(f"on_failure:{self.id}", exc_info.type.__name__)


@app.task(name="with_own_request", Request=OwnRequest)
def with_own_request(key: str) -> None:
    if key:
        tidy(key)
        time.sleep(60)
    raise ValueError("its own")


@app.task(name="refuse")
def refuse(key: str) -> str:
    """Is asked to leave, and comes to its end instead."""
    try:
        mark(key, os.getpid())
        app.backend.client.blpop(f"go:{key}", 30)
    except SystemExit:
        mark(f"{key}:asked")
        app.backend.client.blpop(f"go:{key}", 30)
    return "done"


class Lingering(Task):  # type: ignore[misc]
    """Its end is stored, and the pool does not hear of it for long."""

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        self.linger(task_id)

    def on_failure(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        self.linger(task_id)

    def linger(self, task_id: str) -> None:
        mark(f"stored:{task_id}", os.getpid())
        time.sleep(60)


@app.task(name="linger", base=Lingering, acks_late=True)
def linger(fails: bool) -> str:
    if fails:
        raise ValueError("its own")
    return "done"


@app.task(name="async_deaf")
async def async_deaf(key: str) -> None:
    mark(key)
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)


@app.task(name="stubborn")
def stubborn(key: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    mark(key, f"{os.getpid()} {process.pid}")
    while True:
        try:
            time.sleep(60)
        except SoftTimeLimitExceeded:
            continue


@app.task(name="die")
def die(how: str) -> None:
    if how == "exit":
        os._exit(3)
    os.kill(os.getpid(), signal.SIGSEGV if how == "segfault" else signal.SIGKILL)


@app.task(name="count", acks_late=True, reject_on_worker_lost=True)
def count(key: str, number: int) -> int:
    while True:
        try:
            app.backend.client.sadd(key, number)
        except ConnectionError:  # the test has stopped Redis: not this task's own failure
            time.sleep(0.05)
        else:
            return number


@app.task(name="eat")
def eat(megabytes: int) -> int:
    global _eaten
    _eaten = bytearray(megabytes * 1024 * 1024)
    return os.getpid()


_eaten: bytearray = bytearray()


@app.task(name="start_things")
def start_things() -> list[Any]:
    """A process, a thread, an event loop: as a task may."""
    import multiprocessing

    with multiprocessing.get_context("spawn").Pool(1) as pool:
        squared = pool.apply(pow, (3, 2))
    heard: list[int] = []
    thread = threading.Thread(target=heard.append, args=(4,))
    thread.start()
    thread.join()
    return [squared, heard[0], asyncio.run(_five())]


async def _five() -> int:
    await asyncio.sleep(0)
    return 5


@app.task(name="conf")
def conf() -> str:
    return str(app.conf.made_in_code)


# --- coroutines --------------------------------------------------------------------------------

colour: contextvars.ContextVar[str] = contextvars.ContextVar("colour", default="none")


@app.task(name="nap", bind=True)
async def nap(self: Any, seconds: float) -> list[str]:
    before = colour.get()
    colour.set(self.request.id)
    await asyncio.sleep(seconds)
    assert app.current_task is not None
    return [self.request.id, colour.get(), before, app.current_task.request.id]


@app.task(name="gather", bind=True)
async def gather(self: Any, key: str, size: int) -> int:
    """Ends when `size` of them have begun: it does if, and only if, they run beside each other."""
    client = app.backend.client
    client.incr(key)
    while int(client.get(key)) < size:
        await asyncio.sleep(0.02)
    return os.getpid()


@app.task(name="async_retry", bind=True, max_retries=3)
async def async_retry(self: Any, times: int) -> int:
    await asyncio.sleep(0)
    if self.request.retries < times:
        raise self.retry(countdown=0)
    return int(self.request.retries)


@app.task(
    name="async_autoretry",
    bind=True,
    autoretry_for=(KeyError,),
    retry_backoff=False,
    max_retries=3,
    default_retry_delay=0,
)
async def async_autoretry(self: Any, times: int) -> int:
    await asyncio.sleep(0)
    if self.request.retries < times:
        raise KeyError("again")
    return int(self.request.retries)


@app.task(name="async_fail")
async def async_fail() -> None:
    await asyncio.sleep(0)
    raise OwnError(4, hint="awaited")


@app.task(name="async_hold", bind=True)
async def async_hold(self: Any, key: str) -> str:
    try:
        mark(key, os.getpid())
        await asyncio.sleep(60)
    except SoftTimeLimitExceeded:
        await asyncio.sleep(0)
        return "tidied"
    finally:
        mark(f"{key}:finally")
    return "slept"


@app.task(name="async_parent", bind=True)
async def async_parent(self: Any, seconds: float) -> list[str]:
    await asyncio.sleep(seconds)
    child = request.delay()
    return [self.request.id, child.id]


@app.task(name="async_say")
async def async_say(word: str) -> None:
    print(f"awaited {word}")
    await asyncio.sleep(0)
