"""`Capsule(app)` beside what applications already have: it joins, and replaces nothing."""

from __future__ import annotations

import asyncio
import getpass
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, Task, chain, group
from celery.contrib.abortable import AbortableAsyncResult, AbortableTask
from celery.contrib.testing.worker import start_worker
from celery.result import AsyncResult

from capsule_tasks import Capsule, Execution
from capsule_tasks.client import EagerExecution
from capsule_tasks.client import Task as CapsuleTask
from capsule_tasks.errors import ExecutionEnded, NoOpenQuestion
from capsule_tasks.testing import eager
from capsule_tasks.testing.servers import free_port
from tests.acceptance.workers import HANG_S, ROOT, Worker, eventually, is_running, unique

pytest_plugins = ["capsule_tasks.testing.fixtures"]


class Own(Task):
    """A task class of the application's."""

    shouted = False

    def shout(self) -> str:
        return self.name.upper()

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        type(self).shouted = True


def make_app(**options: Any) -> Celery:
    app = Celery(
        "dropin", broker="memory://", backend="cache+memory://", set_as_current=False, **options
    )
    app.conf.task_default_queue = "dropin"
    return app


def test_a_custom_task_class_is_combined_with_ours() -> None:
    app = make_app(task_cls=Own)
    Capsule(app)

    @app.task(shared=False, name="t")
    def t() -> int:
        return 1

    assert isinstance(t, Own)
    assert isinstance(t, CapsuleTask)
    assert t.shout() == "T"


@pytest.mark.parametrize("has_options", [True, False])
def test_a_task_class_with_results_of_its_own_keeps_them(*, has_options: bool) -> None:
    class OwnResult(AsyncResult):
        def shout(self) -> str:
            return str(self.id).upper()

    class WithResults(Task):
        def AsyncResult(self, task_id: str, **options: Any) -> OwnResult:  # noqa: N802 - Celery's
            return OwnResult(task_id, app=self.app, **options)

    app = make_app()
    Capsule(app)

    @app.task(shared=False, name="t", base=WithResults if has_options else AbortableTask)
    def t() -> int:
        return 1

    for result in (t.AsyncResult("x"), t.delay()):
        assert isinstance(result, Execution)
        assert isinstance(result, OwnResult if has_options else AbortableAsyncResult)
        assert result.app is app
    if has_options:
        assert t.AsyncResult("x").shout() == "X"


def test_tasks_that_exist_already_and_those_with_a_base_are_mixed_with() -> None:
    app = make_app()

    @app.task(shared=False, name="early", base=Own)
    def early() -> int:
        return 1

    assert early.name == "early"  # evaluated: it is there before the Capsule
    Capsule(app)

    @app.task(shared=False, name="late", base=Own)
    def late() -> int:
        return 1

    app.finalize()
    for task in (early, late):
        assert isinstance(task, CapsuleTask)
        assert isinstance(task, Own)
    assert type(app.tasks["celery.chord"]).__mro__[1] is not CapsuleTask


def test_the_pool_is_a_default_and_a_users_own_stays(caplog: pytest.LogCaptureFixture) -> None:
    app = make_app()
    Capsule(app)
    assert app.conf.worker_pool == "capsule_tasks.taskpool:TaskPool"
    other = make_app()
    other.conf.update(worker_pool="threads", accept_content=["json", "pickle"])
    capsule = Capsule(other)
    assert other.conf.worker_pool == "threads"
    assert "'threads'" in capsule.conflicts[0]
    assert "pickle" in capsule.conflicts[1]
    assert "'threads'" in caplog.text


def test_delay_gives_an_execution(redis_url: str) -> None:
    app = Celery("dropin", broker=redis_url, backend=redis_url, set_as_current=False)
    app.conf.task_default_queue = "nobody-listens"
    Capsule(app)

    @app.task(shared=False, name="t")
    def t() -> int:
        return 1

    execution = t.delay()
    assert isinstance(execution, Execution)
    assert execution.state == "PENDING"
    assert isinstance(t.AsyncResult(execution.id), Execution)
    app.close()


def test_eager_tasks_need_no_redis_coroutines_included(eager_tasks: Any) -> None:
    app = make_app()
    Capsule(app)

    @app.task(shared=False, name="add")
    def add(x: int, y: int) -> int:
        return x + y

    @app.task(shared=False, name="slow_add", bind=True, max_retries=2)
    async def slow_add(self: Any, x: int, y: int) -> int:
        await asyncio.sleep(0)
        if self.request.retries < 1:
            raise self.retry(countdown=0)
        return x + y

    eager_tasks(app)
    result = add.delay(1, 2)
    assert isinstance(result, EagerExecution)
    assert result.get() == 3
    assert slow_add.delay(1, 2).get() == 3
    assert chain(slow_add.s(1, 1), add.s(2))().get() == 4
    assert group(add.s(n, n) for n in range(3))().get() == [0, 2, 4]

    async def inside_a_loop() -> int:
        value: int = slow_add.delay(2, 3).get()
        return value

    assert asyncio.run(inside_a_loop()) == 5


def test_eager_tasks_ask_no_redis_that_is_configured() -> None:
    """As a user's own tests have it: only the setting, and no server at that address."""
    nowhere = f"redis://127.0.0.1:{free_port()}"
    app = Celery("dropin", broker=nowhere, backend=nowhere, set_as_current=False)
    app.conf.task_always_eager = True
    Capsule(app)

    @app.task(shared=False, name="t")
    def t() -> int:
        return 1

    execution = t.delay()
    assert isinstance(execution, Execution)
    assert (execution.get(), execution.state, execution.ready()) == (1, "SUCCESS", True)
    assert execution.cancel() == execution.interrupt() == "over"
    assert execution.state == "SUCCESS"
    [ended] = execution.events()
    assert execution.tail() == [ended]
    assert execution.tail(0) == list(execution.output()) == []
    snapshot = execution.snapshot()
    assert (snapshot.state, snapshot.outcome, snapshot.task) == ("ended", "succeeded", "t")
    assert execution.question() is None
    with pytest.raises(NoOpenQuestion):
        execution.respond("late")
    with pytest.raises(NoOpenQuestion):
        execution.respond("late", request_id="r")
    with pytest.raises(ExecutionEnded):
        execution.stack()
    with pytest.raises(ValueError, match="grace_s"):
        execution.cancel(-1)


def test_eager_mode_restores_what_it_changed() -> None:
    app = make_app()
    Capsule(app)

    @app.task(shared=False, name="fail")
    def fail() -> None:
        raise ValueError("why")

    with eager(app), pytest.raises(ValueError, match="why"):
        fail.delay().get()
    with eager(app, propagates=True), pytest.raises(ValueError, match="why"):
        fail.delay()
    assert app.conf.task_always_eager is False


def test_eager_tasks_have_their_questions_answered(eager_tasks: Callable[..., Any]) -> None:
    app = make_app()
    Capsule(app)

    @app.task(shared=False, name="greet")
    def greet() -> str:
        return f"{input('first? ')} {getpass.getpass()} {sys.stdin.readline()}"

    @app.task(shared=False, name="ask_later")
    async def ask_later() -> str:
        return input("later? ")  # noqa: ASYNC250  it waits for nothing here

    before = input, getpass.getpass, sys.stdin
    with eager(app, answers=["Ada", "secret", "King", "now"]):
        assert greet.delay().get() == "Ada secret King\n"
        assert ask_later.delay().get() == "now"
        unanswered = ask_later.delay()
        with pytest.raises(AssertionError, match=r"'later\? ', and all 4 answers"):
            unanswered.get()
        assert sys.stdin.read() == ""
    assert (input, getpass.getpass, sys.stdin) == before
    eager_tasks(app, answers=["at last"])
    assert ask_later.delay().get() == "at last"
    with eager(app, answers=(f"answer {n}" for n in range(2))):
        assert ask_later.delay().get() == "answer 0"


def test_a_line_of_answers_may_be_read_in_parts() -> None:
    with eager(make_app(), answers=["Ada King", "x"]):
        stdin = sys.stdin
        assert [stdin.readline(3), stdin.read(2), stdin.readline()] == ["Ada", " K", "ing\n"]
        assert [stdin.readline(2), stdin.readline(2)] == ["x\n", ""]


def test_answers_are_texts() -> None:
    for wrong in ("yes", [1], 1, iter([1])):
        with (
            pytest.raises(TypeError, match="must be a list of texts"),
            eager(make_app(), answers=wrong),
        ):
            raise AssertionError("it was taken")


@pytest.fixture
def root_logger() -> Iterator[None]:
    """A worker sets up the logging of its process, which here is that of other tests, too."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    yield
    root.setLevel(level)
    root.handlers[:] = handlers


@pytest.mark.usefixtures("root_logger")
@pytest.mark.filterwarnings("ignore")  # the children are copies: warnings would be errors there too
def test_a_worker_in_a_thread_of_this_process_works(redis_url: str) -> None:
    app = Celery("threaded", broker=redis_url, backend=redis_url, set_as_current=False)
    app.conf.update(task_default_queue="threaded", broker_connection_retry_on_startup=True)
    Capsule(app)

    @app.task(shared=False, name="add")
    def add(x: int, y: int) -> int:
        return x + y

    @app.task(shared=False, name="nap")
    async def nap() -> str:
        await asyncio.sleep(0.01)
        return "slept"

    handlers = {n: signal.getsignal(n) for n in signal.valid_signals()}
    threads = set(threading.enumerate())
    with start_worker(
        app, pool=app.conf.worker_pool, perform_ping_check=False, shutdown_timeout=HANG_S
    ) as worker:
        assert add.delay(1, 2).get(timeout=HANG_S) == 3
        assert nap.delay().get(timeout=HANG_S) == "slept"
        assert {n: signal.getsignal(n) for n in handlers} == handlers
        pids = worker.stats()["pool"]["processes"]
    app.close()
    assert {n: signal.getsignal(n) for n in handlers} == handlers
    eventually(lambda: not any(map(is_running, pids)), "the end of the children")

    def left() -> list[threading.Thread]:
        ours = [t for t in threading.enumerate() if t.name.startswith("capsule")]
        return [thread for thread in ours if thread not in threads]

    eventually(lambda: not left(), "the end of the threads")
    assert worker.pool.info["processes"] == pids  # what is asked afterwards has an answer


def test_a_django_project_with_its_results_and_its_beat(
    redis_url: str, tmp_path: Path, pool: str
) -> None:
    """`delay_on_commit`, django-celery-results, django-celery-beat; the ORM in a task."""
    environment = {
        "TEST_DATABASE": str(tmp_path / "db.sqlite3"),
        "DJANGO_SETTINGS_MODULE": "tests.acceptance.others.django_settings",
    }
    module = "tests.acceptance.others.django_use"
    worker = Worker(
        redis_url,
        tmp_path,
        "-B",
        "-s",
        str(tmp_path / "beat"),
        pool=pool,
        app="tests.acceptance.others.django_app",
        **environment,
    )
    command = [sys.executable, "-m", module]
    environment = {**os.environ, "REDIS_URL": redis_url, "TEST_QUEUE": worker.queue} | environment
    subprocess.run([*command, "migrate"], cwd=ROOT, env=environment, check=True, timeout=HANG_S)
    with worker:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            timeout=3 * HANG_S,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{done.stderr}\n{worker.log}"
        worker.stop()  # in order: Celery's embedded beat outlives a worker that is killed


def test_sentry_opentelemetry_and_a_custom_task_class_observe_tasks(
    redis_url: str, tmp_path: Path, pool: str
) -> None:
    observed = "tests.acceptance.others.observed_app"
    with Worker(redis_url, tmp_path, pool=pool, app=observed) as worker:
        for name in ("fail", "afail") if pool == "capsule" else ("fail",):
            word = unique()
            with pytest.raises(ValueError, match=word):
                worker.get(name, word)
            assert worker.heard("sentry") == word
            assert worker.heard(f"returned:{name}") == "FAILURE"
        result = worker.send("fine")
        assert result.get(timeout=HANG_S) == 1
        assert worker.heard("called:fine") == result.id
        assert worker.heard("returned:fine") == "SUCCESS"
        assert int(worker.heard("span:run/fine"), 16)


def test_the_guides_examples_run() -> None:
    page = (ROOT / "docs" / "celery.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 4
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "docs/celery.md", "exec"), names)
    assert names["app"].conf.worker_pool == "capsule_tasks.taskpool:TaskPool"
