"""Tasks of the acceptance app that fail, are retried, replaced or lost, or resist a stop."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from celery import Task, chain
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded
from celery.worker.request import Request

from tests.acceptance.app import OwnError, add, app, mark, tidy


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


@app.task(name="print_and_crash")
def print_and_crash() -> None:
    print("last words")
    os.kill(os.getpid(), signal.SIGKILL)


@app.task(name="unacked_late", acks_late=True, acks_on_failure_or_timeout=False)
def unacked_late(key: str, how: str) -> int:
    """End as `how` says at the first delivery."""
    times = int(app.backend.client.incr(key))
    if times == 1 and how == "failure":
        raise ValueError("its own")
    if times == 1:
        time.sleep(60)
    return times


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
        # It may come between a command and its reply: what is sent over that connection next would
        # wait for the other command's 30 seconds.
        app.backend.client.connection_pool.disconnect()
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


@app.task(name="signal_itself")
def signal_itself(name: str, key: str) -> None:
    try:
        os.kill(os.getpid(), signal.Signals[name])
        time.sleep(60)
    finally:
        mark(key)
