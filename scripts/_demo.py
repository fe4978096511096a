"""Show the abilities of tasks in sessions, on a Redis server and two workers of its own."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from capsule_tasks import Profile, SessionPool  # noqa: E402 - the path comes first
from capsule_tasks.errors import ExecutionFailed, PoolUnavailable, Unconfined  # noqa: E402
from capsule_tasks.protocol.events import AttemptEnded, Ended  # noqa: E402
from capsule_tasks.protocol.messages import InputRequest, Output, Progress  # noqa: E402
from capsule_tasks.testing.servers import PrivateServer, free_port  # noqa: E402

if TYPE_CHECKING:
    from capsule_tasks import Execution

_URLS = ("CAPSULE_BROKER_URL", "CAPSULE_RESULT_URL", "CAPSULE_REDIS_URL", "REDIS_URL")
PAGES = 100
WAIT_S = 60
LOG_LINES = 30
"""Lines of its log that are shown of a worker that does not become ready."""
_USES_COLOUR = sys.stdout.isatty() and "NO_COLOR" not in os.environ
BOLD, DIM, GREEN, CYAN = "1", "2", "32", "36"

STRANGE_CODE = (
    ("total = 41", ""),
    ("total + 1", "a session keeps its variables"),
    ("open('/etc/passwd').read()", "files of this machine"),
    ("__import__('socket').create_connection(('127.0.0.1', 6379))", "the network"),
    ("__import__('os').kill(__import__('os').getppid(), 9)", "other processes"),
    ("'DATABASE_URL' in __import__('os').environ", "the environment of the parent"),
    ("x = bytearray(2**33)", "8 GiB of memory"),
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/demo")
    parser.add_argument("--stay", action="store_true", help="keep everything running until Ctrl-C")
    stays = parser.parse_args().stay
    with tempfile.TemporaryDirectory() as temporary, PrivateServer(Path(temporary)) as server:
        directory = Path(temporary)
        # The app reads these variables first: without them it would use a Redis of the user's.
        os.environ |= dict.fromkeys(_URLS, server.url)
        with contextlib.ExitStack() as stack:
            say(f"{paint('Redis', BOLD)}    {server.url}")
            names = ("ada@demo", "grace@demo")
            workers = {name: stack.enter_context(worker(name, directory)) for name in names}
            wait_until_ready(workers, directory)
            say(f"{paint('Workers', BOLD)}  {' and '.join(workers)}")
            scenes(workers)
            with flower(directory) as address:
                say(f"{paint('Flower', BOLD)}   {address}")
                if not stays:
                    say("         stops now; scripts/demo --stay keeps it running")
                else:
                    say("         Ctrl-C stops everything")
                    with contextlib.suppress(KeyboardInterrupt):
                        signal.pause()


def scenes(workers: dict[str, subprocess.Popen[bytes]]) -> None:
    watch_a_task()
    cancel_a_task()
    answer_a_task()
    lose_a_worker(workers)
    asyncio.run(confine_code())
    run_pipeline()


# --- one task ------------------------------------------------------------------------------------


def watch_a_task() -> None:
    from scripts._demo_app import report

    title("Watch a running task")
    call("execution = report.delay(['January', 'February', 'March'])")
    call("for event in execution.events(): ...")
    follow(report.delay(["January", "February", "March"]))


def cancel_a_task() -> None:
    from scripts._demo_app import spin

    title("Cancel a task that is in an endless loop")
    call("execution = spin.delay()")
    execution = spin.delay()
    cancelled_at: list[float] = []

    def cancel(message: object) -> None:
        if isinstance(message, Output) and not cancelled_at:
            call("execution.cancel()")
            cancelled_at.append(time.monotonic())
            execution.cancel()

    ended_at = follow(execution, cancel)
    say(f"  {paint(f'stopped {(ended_at - cancelled_at[0]) * 1000:.1f} ms after the call', GREEN)}")


def answer_a_task() -> None:
    from scripts._demo_app import publish

    title("Answer a task that asks")
    call("execution = publish.delay()")
    execution = publish.delay()

    def answer(message: object) -> None:
        if isinstance(message, InputRequest):
            call("execution.respond('yes')")
            execution.respond("yes")

    follow(execution, answer)


def lose_a_worker(workers: dict[str, subprocess.Popen[bytes]]) -> None:
    from scripts._demo_app import order

    title("Kill a worker: another one finishes its task, and what was charged is not charged again")
    call("execution = order.delay(42)")
    execution = order.delay(42)
    killed: list[str] = []

    def kill_then_answer(message: object) -> None:
        match message:
            case InputRequest() if not killed:
                name = execution.snapshot().worker
                call(f"os.kill({workers[name].pid}, signal.SIGKILL)", name)
                workers[name].kill()
                killed.append(name)
                say(
                    paint(
                        "  waiting until its lease lapses and its message is delivered again", DIM
                    )
                )
            case InputRequest():
                call(
                    "execution.respond('Lyon')", f"{execution.snapshot().worker} runs the task now"
                )
                execution.respond("Lyon")

    follow(execution, kill_then_answer)


def follow(execution: Execution, react: Callable[[object], None] = lambda _message: None) -> float:
    """Show the events of an execution until its end, and return when the end was received."""
    started = time.monotonic()
    for event in execution.events():
        received_at = time.monotonic()
        if shown := describe(event.message):
            say(f"  {paint(f'{received_at - started:6.3f} s', DIM)}  {shown}")
        react(event.message)
    if isinstance(event.message, Ended) and event.message.outcome == "succeeded":
        call("execution.get()")
        say(f"      {execution.get(timeout=WAIT_S)!r}")
    return received_at


def describe(message: object) -> str:
    match message:
        case Output(data=text):
            return f"printed   {paint(text.strip(), CYAN)}" if text.strip() else ""
        case Progress(done=done, total=total):
            return f"progress  {done:g} of {total:g}"
        case InputRequest(prompt=prompt):
            return f"asks      {paint(prompt, CYAN)}"
        case AttemptEnded():
            return "lost      with its worker; another attempt follows"
        case Ended(outcome="succeeded"):
            return paint("succeeded", GREEN)
        case Ended(outcome=outcome):
            return paint(str(outcome), GREEN)
    return ""


# --- a sandbox, and a batch ----------------------------------------------------------------------


async def confine_code() -> None:
    title("Run code that you do not trust in a sandbox")
    os.environ["DATABASE_URL"] = "postgres://demo"
    try:
        async with SessionPool({"code": Profile.sandbox()}) as pool:
            async with pool.borrow("code") as session:
                for source, attempted in STRANGE_CODE:
                    call(source, attempted)
                    try:
                        value = (await session.run(source)).value
                    except ExecutionFailed as failure:
                        say(f"      {failure}")
                    else:
                        if value is not None:
                            say(f"      {value!r}")
    except (Unconfined, PoolUnavailable) as reason:
        say(f"      this machine cannot confine code: {reason}")


def run_pipeline() -> None:
    """A group of coroutines, a chord of blocking tasks, and a chain around the chord."""
    from celery import chain, chord, group

    from scripts._demo_app import app
    from workers.pipeline import fetch, report, square, total

    title("Run a batch: group, chord and chain are Celery's own")
    started = time.monotonic()
    pages = group(fetch.s(page) for page in range(PAGES))().get(timeout=WAIT_S)
    elapsed_s = time.monotonic() - started
    say(f"  group    {PAGES} pages, 0.2 s each, were awaited together in {elapsed_s:.1f} s")
    started = time.monotonic()
    squares = chord([square.s(page) for page in pages], total.s())
    reported = chain(squares, report.s("sum of squares")).delay().get(timeout=WAIT_S)
    expected = sum(number * number for page in pages for number in page)
    assert reported == f"sum of squares: {expected}", reported
    say(f"  chord    {reported}, in {time.monotonic() - started:.1f} s")
    stats = app.control.inspect(timeout=5, limit=1).stats() or {}  # of the worker that is left
    for name, statistics in stats.items():
        for session in statistics["pool"]["sessions"]:
            tasks, kind, pid = session["tasks"], session["kind"], session["pid"]
            say(f"  session  {kind} child {pid} of {name} has run {tasks} tasks")
    say("")


# --- processes -----------------------------------------------------------------------------------


@contextlib.contextmanager
def worker(name: str, directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    options = ("-n", name, "-c", "2", "-l", "INFO", "--without-mingle", "--without-gossip")
    with celery(directory / f"{name}.log", "worker", *options) as process:
        yield process


def wait_until_ready(workers: dict[str, subprocess.Popen[bytes]], directory: Path) -> None:
    """Wait until each worker replies; one that has exited, or is too late, fails with its log."""
    from scripts._demo_app import app

    deadline = time.monotonic() + WAIT_S
    ready: set[str] = set()
    while not ready.issuperset(workers):
        for reply in app.control.ping(destination=list(workers), timeout=0.5, limit=len(workers)):
            ready |= reply.keys()
        for name, process in workers.items():
            if process.poll() is not None:
                say(f"{name} exited with status {process.returncode} before it was ready:")
            elif name not in ready and time.monotonic() > deadline:
                say(f"{name} was not ready after {WAIT_S} s:")
            else:
                continue
            lines = (directory / f"{name}.log").read_text(errors="replace").splitlines()
            sys.exit("\n".join(lines[-LOG_LINES:]))


@contextlib.contextmanager
def celery(log: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """One of Celery's commands for the demo's app; it is stopped when the block ends."""
    command = [sys.executable, "-m", "celery", "-A", "scripts._demo_app", *arguments]
    with log.open("wb") as sink:
        process = subprocess.Popen(command, cwd=ROOT, stdout=sink, stderr=sink)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def flower(directory: Path) -> Iterator[str]:
    """Flower's address once it answers; or why there is none."""
    if importlib.util.find_spec("flower") is None:
        yield "is not installed: pip install 'capsule-tasks[flower]'"
        return
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    options = (f"--port={port}", "--address=127.0.0.1")
    with celery(directory / "flower.log", "flower", *options) as process:
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                urllib.request.urlopen(f"{url}/healthcheck", timeout=5).read()
                break
            except OSError:
                if time.monotonic() > deadline or process.poll() is not None:
                    raise
                time.sleep(0.1)
        yield f"{url}/workers"


# --- the screen ----------------------------------------------------------------------------------


def title(text: str) -> None:
    say(f"\n{paint(text, BOLD)}")


def call(text: str, remark: str = "") -> None:
    comment = paint(f"  # {remark}", DIM) if remark else ""
    say(f"  {paint('>>>', DIM)} {text}{comment}")


def paint(text: str, style: str) -> str:
    return f"\x1b[{style}m{text}\x1b[0m" if _USES_COLOUR else text


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
