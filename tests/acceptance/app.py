"""The app of the acceptance tests: an ordinary Celery app, that knows nothing of its pool."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from celery import Celery, bootsteps, signals
from celery.exceptions import SoftTimeLimitExceeded
from celery.result import allow_join_result
from redis.exceptions import ConnectionError  # noqa: A004 - Redis's own

import capsule_tasks

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
    worker_pool_restarts=True,
    accept_content=["json", "msgpack", "yaml", "pickle"],
    capsule_loss_limit=int(os.environ.get("TEST_LOSS_LIMIT", "5")),
    capsule_ready_s=float(os.environ.get("TEST_READY_S", "60")),
    made_in_code="by the worker",
    capsule_lease_s=float(os.environ.get("TEST_LEASE", "15")),
    capsule_retention={
        "silent_retention_s": float(os.environ.get("TEST_QUIET", "30")),
        "live_bytes": int(os.environ.get("TEST_LIVE", str(1024 * 1024))),
        "retention_bytes": int(os.environ.get("TEST_LIVE", str(64 * 1024))),
    },
    capsule_output=os.environ.get("TEST_OUTPUT", "drop_oldest"),
    capsule_redis_url=os.environ.get("TEST_STREAMS_URL"),
    worker_soft_shutdown_timeout=float(os.environ.get("TEST_SOFT_S", "0")),
)
if start := os.environ.get("TEST_START"):
    app.conf.capsule_start = start
app.conf.update(json.loads(os.environ.get("TEST_CONF", "{}")))
log = logging.getLogger("tests.acceptance.app")


class OwnError(Exception):
    """Its constructor takes other arguments than the exception keeps."""

    def __init__(self, code: int, *, hint: str) -> None:
        super().__init__(f"code {code}", hint)
        self.code = code


def mark(name: str, value: Any = "") -> None:
    """Set a mark that the test waits for."""
    app.backend.client.rpush(f"mark:{name}", str(value))


@signals.worker_ready.connect
def tell_ready(**_: Any) -> None:
    # Once: a worker that starts itself again has another file behind that number.
    if descriptor := os.environ.pop("TEST_READY_FD", None):
        os.write(int(descriptor), b"ready\n")


@signals.worker_init.connect
def shorten_pauses(**_: Any) -> None:
    """Look for messages and revokes more often; when a message is overdue remains as it is."""
    # Imported in the worker and not in its children, which do not know the pool.
    from capsule_tasks.executions import lifecycle
    from capsule_tasks.taskpool.stock_redis import kept_revokes, visibility

    pauses = [(visibility, "_SWEEP_EVERY_S", 0.2)]
    if grace_s := os.environ.get("TEST_ASYNC_GRACE_S"):
        pauses.append((lifecycle, "_ASYNC_GRACE_S", float(grace_s)))
    for module, name, seconds in pauses:
        assert hasattr(module, name), f"{module.__name__} has no {name} any more"
        setattr(module, name, seconds)
    kept_revokes.Revokes.__init__.__kwdefaults__["poll_s"] = 0.5


@signals.worker_init.connect
def set_in_the_worker_alone(**_: Any) -> None:
    if os.environ.get("TEST_SET_IN_WORKER"):
        app.add_defaults({"added": "by the worker", "of_no_words": signals, "made_in_code": "?"})


class SignalAtStart(bootsteps.StartStopStep):
    """The worker is told to leave when its children run but its event loop does not run yet."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def start(self, _parent: Any) -> None:
        signal.raise_signal(int(os.environ["TEST_SIGNAL_AT_START"]))


if "TEST_SIGNAL_AT_START" in os.environ:
    app.steps["consumer"].add(SignalAtStart)


@signals.worker_process_init.connect
def tell_process_init(**_: Any) -> None:
    if (gate := os.environ.get("TEST_GATE")) and Path(gate).exists():
        while Path(gate).exists():  # kept back until the test opens it
            time.sleep(0.02)
    if (trap := os.environ.get("TEST_TRAP")) and Path(trap).exists():
        threading.Timer(0.05, os._exit, (3,)).start()  # once it is ready
    print(f"process {os.getpid()} begins")


if os.environ.get("TEST_OWN_LOGGING"):

    @signals.setup_logging.connect
    def log_in_ones_own_way(**_: Any) -> None:
        logging.basicConfig(level=logging.INFO)


@signals.worker_process_shutdown.connect
def tell_process_shutdown(**_: Any) -> None:
    if key := os.environ.get("TEST_MARK_SHUTDOWNS"):
        mark(key, os.getpid())


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


@app.task(name="set_mark")
def set_mark(key: str) -> str:
    mark(key)
    return "marked"


@app.task(name="signalled")
def signalled() -> int:
    return os.getpid()


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


@app.task(name="steps")
def steps(key: str, count: int) -> int:
    """Print the steps, and wait before the end until the test calls `go`."""
    for number in range(count):
        print(f"step {number}")
        capsule_tasks.progress(number + 1, count, f"note {number}")
    mark(key, os.getpid())
    app.backend.client.blpop(f"go:{key}", 30)
    return count


@app.task(name="twice")
def twice(key: str) -> int:
    """Print, wait until the test calls `go`, and print again."""
    print("before", flush=True)
    mark(key, os.getpid())
    app.backend.client.blpop(f"go:{key}", 60)
    print("after", flush=True)
    return 2


@app.task(name="paint")
def paint(key: str) -> None:
    """Writes a colour, and what would move the cursor, ring, and set the title."""
    print("\x1b[31mred\x1b[0m \x1b[2J\x1b[1;1Hmoved\x07 \x1b]0;title\x07end", flush=True)
    app.backend.client.blpop(f"go:{key}", 60)


@app.task(name="grip")
def grip(how: str) -> None:
    """Be silent from now on, without even reporting the begin: the process cannot."""
    if how == "interpreter":
        re.match(r"(a+)+$", "a" * 40 + "b")  # holds it for hours
    else:
        os.kill(os.getpid(), signal.SIGSTOP)


@app.task(name="ask")
def ask(question: str) -> str:
    return f"heard {input(question)}"


@app.task(name="ask_in_threads")
def ask_in_threads(*questions: str) -> list[str]:
    """Asks all of them at once."""
    answers: dict[str, str] = {}

    def ask_one(question: str) -> None:
        answers[question] = input(question)

    threads = [threading.Thread(target=ask_one, args=(question,)) for question in questions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [answers[question] for question in questions]


@app.task(name="from_a_process")
def from_a_process() -> None:
    """End before the worker has received the message of the begin."""
    os.system("echo out; echo err >&2")


@app.task(name="flood_from_a_process")
def flood_from_a_process(size: int) -> None:
    os.system(f"yes | head -c {size}")


@app.task(name="busy")
def busy(key: str) -> None:
    mark(key, os.getpid())
    while True:
        pass


@app.task(name="interruptible")
def interruptible(key: str) -> str:
    try:
        mark(key)
        time.sleep(60)
    except KeyboardInterrupt:
        return "interrupted"
    return "slept"


@app.task(name="flood")
def flood(size: int) -> int:
    line = "x" * 999 + "\n"
    for _ in range(size // 1000):
        sys.stdout.write(line)
    return size


@app.task(name="flood_lines")
def flood_lines(key: str, lines: int) -> None:
    """Write short lines, in order, and then wait until the test calls `go`."""
    for number in range(lines):
        sys.stdout.write(f"{number}\n")
    mark(key, os.getpid())
    app.backend.client.blpop(f"go:{key}", 60)


@app.task(name="sleep")
def sleep(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


@app.task(name="sleep_within", soft_time_limit=0.4)
def sleep_within(seconds: float) -> float:
    """Has a limit of its own."""
    time.sleep(seconds)
    return seconds


@app.task(name="deaf_within", time_limit=0.6, soft_time_limit=0.3)
def deaf_within(seconds: float) -> None:
    """The same, and ignore the soft limit."""
    deaf(seconds)


@app.task(name="deaf")
def deaf(seconds: float) -> None:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        with contextlib.suppress(SoftTimeLimitExceeded):
            time.sleep(left)


@app.task(name="blip")
def blip(number: int, seconds: float = 0, key: str = "") -> int:
    """One of thousands; some say that they have begun."""
    if key:
        mark(key, number)
    time.sleep(seconds)
    return number


@app.task(name="hold")
def hold(key: str) -> int:
    """Run until the test calls `go`."""
    mark(key, os.getpid())
    app.backend.client.blpop(f"go:{key}", 60)
    return os.getpid()


@app.task(name="tell_event", bind=True)
def tell_event(self: Any, word: str) -> None:
    self.send_event("task-halfway", word=word)


@app.task(name="leave_things")
def leave_things(key: str) -> int:
    """Leave a process, one that has left its family, and a thread, without waiting for them."""
    code = "import time; time.sleep(60)"
    left = [
        subprocess.Popen([sys.executable, "-c", code], start_new_session=is_alone)
        for is_alone in (False, True)
    ]
    threading.Thread(target=time.sleep, args=(60,)).start()
    mark(key, " ".join(str(process.pid) for process in left))
    return os.getpid()


@app.task(name="wait_for_another", acks_late=True, reject_on_worker_lost=True)
def wait_for_another(key: str) -> Any:
    """Wait for a task that no worker runs."""
    result = app.send_task("set_mark", (key,), queue=f"nobody-{key}")
    mark(key, os.getpid())
    with allow_join_result():
        return result.get()


@app.task(name="hold_late", acks_late=True, reject_on_worker_lost=True)
def hold_late(key: str) -> int:
    mark(key, os.getpid())
    app.backend.client.blpop(f"go:{key}", 30)
    return os.getpid()


@app.task(name="write_late", acks_late=True, ignore_result=True)
def write_late(path: str, until: str) -> None:
    """Needs no Redis: adds a line to a file, and runs until there is another one."""
    with Path(path).open("a", encoding="utf-8") as lines:
        lines.write("began\n")
    while not Path(until).exists():
        time.sleep(0.01)


@app.task(name="write_kept", acks_late=True)
def write_kept(path: str, until: str) -> int:
    """The same, with a result."""
    write_late.run(path, until)
    return os.getpid()


@app.task(name="set_mark_late", acks_late=True)
def set_mark_late(key: str) -> str:
    mark(key)
    return "marked"


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


@app.task(name="stamps", bind=True)
def stamps(self: Any) -> dict[str, Any]:
    return {name: self.request.stamps[name] for name in self.request.stamped_headers or ()}


@app.task(name="limited", rate_limit="60/m")
def limited() -> float:
    return time.time()


@app.task(name="count", acks_late=True, reject_on_worker_lost=True)
def count(key: str, number: int) -> int:
    while True:
        try:
            app.backend.client.sadd(key, number)
        except ConnectionError:  # the test has stopped Redis: not this task's own failure
            time.sleep(0.05)
        else:
            return number


def say_lines(number: int, lines: int) -> int:
    for line in range(lines):
        print(f"{number}: {line}", flush=True)
        time.sleep(0.01)  # so that others may break in between
    return number


app.task(name="say_early")(say_lines)
app.task(name="say_late", acks_late=True, reject_on_worker_lost=True)(say_lines)


@app.task(name="eat")
def eat(megabytes: int) -> int:
    global _eaten
    _eaten = bytearray(megabytes * 1024 * 1024)
    return os.getpid()


_eaten: bytearray = bytearray()


@app.task(name="feast")
def feast(megabytes: int, key: str = "") -> int:
    """Eats, holds if there is a key, and gives it all back."""
    food = bytearray(megabytes * 1024 * 1024)
    if key:
        mark(key, os.getpid())
        app.backend.client.blpop(f"go:{key}", 30)
    del food
    return os.getpid()


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


@app.task(name="added")
def added() -> list[Any]:
    return [app.conf.get(name) and str(app.conf[name]) for name in ("added", "of_no_words")]


# These modules use the app.
from tests.acceptance.tasks import coroutines, endings  # noqa: E402, F401
