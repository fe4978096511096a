"""The app of the acceptance tests: an ordinary Celery app, that knows nothing of its pool."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
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

from celery import Celery, Task, bootsteps, chain, signals
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded
from celery.result import allow_join_result
from celery.worker.request import Request
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
    if os.environ.get("TEST_MARK_PROCESSES"):
        mark("process_init", os.getpid())


if os.environ.get("TEST_OWN_LOGGING"):

    @signals.setup_logging.connect
    def log_in_ones_own_way(**_: Any) -> None:
        logging.basicConfig(level=logging.INFO)


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


@app.task(name="set_mark")
def set_mark(key: str) -> str:
    mark(key)
    return "marked"


@app.task(name="signalled")
def signalled() -> int:
    return os.getpid()


@app.task(name="fail")
def fail(text: str) -> None:
    raise ValueError(text, 7)


@app.task(name="fail_own")
def fail_own() -> None:
    raise OwnError(3, hint="look")


class OwnBase(BaseException):
    """No Exception, as what some libraries stop their own code with."""


@app.task(name="fail_base")
def fail_base() -> None:
    raise OwnBase("at the base")


@app.task(name="fail_cancelled")
def fail_cancelled() -> None:
    async def cancelled() -> None:
        raise asyncio.CancelledError("by itself")

    asyncio.run(cancelled())


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


@app.task(name="retry_elsewhere", bind=True)
def retry_elsewhere(self: Any) -> None:
    """Stay in the state of a retry: no worker consumes the new message."""
    raise self.retry(countdown=0, queue=f"nobody-{self.request.id}")


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


@app.task(name="replace_by", bind=True)
def replace_by(self: Any, word: str) -> Any:
    print("before")
    return self.replace(say_it.s(word))


@app.task(name="say_it")
def say_it(word: str) -> None:
    print(word)


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


@app.task(name="print_and_crash")
def print_and_crash() -> None:
    print("last words")
    os.kill(os.getpid(), signal.SIGKILL)


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


@app.task(name="unacked_late", acks_late=True, acks_on_failure_or_timeout=False)
def unacked_late(key: str, how: str) -> int:
    """End as `how` says at the first delivery."""
    times = int(app.backend.client.incr(key))
    if times == 1 and how == "failure":
        raise ValueError("its own")
    if times == 1:
        time.sleep(60)
    return times


@app.task(name="wait_for_another", acks_late=True, reject_on_worker_lost=True)
def wait_for_another(key: str) -> Any:
    """Wait for a task that no worker runs."""
    result = app.send_task("set_mark", (key,), queue=f"nobody-{key}")
    mark(key, os.getpid())
    with allow_join_result():
        return result.get()


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


@app.task(name="reject_when_full", bind=True, acks_late=True)
def reject_when_full(self: Any, key: str, requeue: bool) -> str:
    """Refused on its first delivery, when Redis has just run out of memory."""
    if not self.request.delivery_info["redelivered"]:
        mark(key)
        app.backend.client.config_set("maxmemory", 1)
        raise Reject("no room", requeue=requeue)
    return "again"


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


@app.task(name="lost_once", retry_on_worker_lost=True, max_retries=2, default_retry_delay=0)
def lost_once(key: str) -> int:
    """Celery sends it again, which costs a retry."""
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
    """Store the end, and report it to the pool only much later."""

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


@app.task(name="linger_unacked", base=Lingering, acks_late=True, acks_on_failure_or_timeout=False)
def linger_unacked() -> None:
    raise ValueError("its own")


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


@app.task(name="run_out_of_memory", acks_late=True)
def run_out_of_memory() -> None:
    raise MemoryError("too much")


@app.task(name="async_run_out_of_memory", acks_late=True)
async def async_run_out_of_memory() -> None:
    await asyncio.sleep(0)
    raise MemoryError("too much")


@app.task(name="signal_itself")
def signal_itself(name: str, key: str) -> None:
    try:
        os.kill(os.getpid(), signal.Signals[name])
        time.sleep(60)
    finally:
        mark(key)


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


# --- coroutines --------------------------------------------------------------------------------

colour: contextvars.ContextVar[str] = contextvars.ContextVar("colour", default="none")


@app.task(name="nap", bind=True)
async def nap(self: Any, seconds: float) -> list[str]:
    before = colour.get()
    colour.set(self.request.id)
    await asyncio.sleep(seconds)
    assert app.current_task is not None
    return [self.request.id, colour.get(), before, app.current_task.request.id]


@app.task(name="async_blip")
async def async_blip(number: int, seconds: float = 0, key: str = "") -> int:
    if key:
        mark(key, number)
    await asyncio.sleep(seconds)
    return number


@app.task(name="async_sleep_within", soft_time_limit=0.4)
async def async_sleep_within(seconds: float) -> float:
    await asyncio.sleep(seconds)
    return seconds


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


@app.task(name="async_late", acks_late=True, reject_on_worker_lost=True)
async def async_late(key: str) -> int:
    """Run until the worker is killed; the second delivery ends."""
    times = int(app.backend.client.incr(f"times:{key}"))
    mark(key, os.getpid())
    if times == 1:
        await asyncio.sleep(60)
    return times


@app.task(name="async_parent", bind=True)
async def async_parent(self: Any, seconds: float) -> list[str]:
    await asyncio.sleep(seconds)
    child = request.delay()
    return [self.request.id, child.id]


@app.task(name="async_say")
async def async_say(word: str) -> None:
    print(f"awaited {word}")
    await asyncio.sleep(0)
