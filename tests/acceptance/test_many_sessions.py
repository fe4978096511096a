"""Many calls of one session from many producers, and more sessions than there is room for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from capsule_tasks import Capsule, Execution
from capsule_tasks.storage.keys import TenantKeys, WantedKeys
from tests.acceptance.others.session_callers import COUNT
from tests.acceptance.test_code import code_worker
from tests.acceptance.workers import HANG_S, Worker, close, eventually, is_running, producer
from tests.servers import fresh_prefix

PRODUCERS = 20
PROFILE = "sandbox"
TENANT = "acme"


@pytest.mark.parametrize("calls", [500, pytest.param(10_000, marks=pytest.mark.full)])
def test_calls_of_many_producers_run_once_each_and_in_order(
    redis_url: str, tmp_path: Path, calls: int
) -> None:
    """Each producer submits its calls without waiting for any of them to end."""
    share = calls // PRODUCERS
    conf = {"capsule_prefix": fresh_prefix()}
    with (
        code_worker(redis_url, tmp_path, **conf) as worker,
        ThreadPoolExecutor(PRODUCERS) as threads,
        producers(redis_url, worker.queue, conf) as capsules,
    ):
        capsules[0].session("many").execute("ran = []").get(timeout=HANG_S)
        started = time.monotonic()
        submitting = [
            threads.submit(submit_share, capsule, number, share)
            for number, capsule in enumerate(capsules)
        ]
        submitted = [made.result(10 * HANG_S) for made in submitting]
        submitted_s = time.monotonic() - started
        places = [[one.get(timeout=10 * HANG_S) for one in executions] for executions in submitted]
        took_s = time.monotonic() - started
        ran = capsules[0].session("many").execute("ran").get(timeout=HANG_S)
    print(f"{calls} calls: submitted in {submitted_s:.1f} s, done in {took_s:.1f} s")  # noqa: T201
    assert sorted(place for own in places for place in own) == list(range(1, calls + 1))
    assert all(own == sorted(own) for own in places)
    for number in range(PRODUCERS):
        assert [call for producer, call in ran if producer == number] == list(range(share))


def submit_share(capsule: Capsule, number: int, share: int) -> list[Execution]:
    """The calls of one producer; the value of each is how many have run with it."""
    session = capsule.session("many")
    sources = [f"ran.append(({number}, {call}))\nlen(ran)" for call in range(share)]
    return [session.execute(source) for source in sources]


@contextmanager
def producers(url: str, queue: str, conf: dict[str, Any]) -> Iterator[list[Capsule]]:
    """Apps that share no connection."""
    apps = [producer(url, queue, **conf) for _ in range(PRODUCERS)]
    yield [Capsule(app) for app in apps]
    for app in apps:
        close(app)


@pytest.mark.parametrize(
    ("sessions", "room"),
    [(20, (2, 2)), pytest.param(500, (17, 17, 16), marks=pytest.mark.full)],
)
def test_more_sessions_than_there_is_room_for_take_turns(
    redis_url: str, tmp_path: Path, sessions: int, room: tuple[int, ...]
) -> None:
    """Each of them has a call, and then each a second one: most were evicted in between."""
    prefix = fresh_prefix()
    with ExitStack() as stack, redis.Redis.from_url(redis_url, decode_responses=True) as client:
        workers = [stack.enter_context(crowded(redis_url, tmp_path, prefix, one)) for one in room]
        app = workers[0].app
        app.conf.capsule_prefix = prefix
        capsule = Capsule(app)
        named = [capsule.session(f"turn-{number}", tenant=TENANT) for number in range(sessions)]
        for turn in (1, 2):
            started = time.monotonic()
            executions = [session.execute(COUNT) for session in named]
            assert [one.get(timeout=10 * HANG_S) for one in executions] == [turn] * sessions
            print(f"turn {turn}: {time.monotonic() - started:.1f} s")  # noqa: T201
        assert live(client, prefix) <= sum(room)
        assert capsule.usage(TENANT).live <= sum(room)
        processes = [pid for worker in workers for pid in descendants(worker.pid)]
        with ThreadPoolExecutor() as threads:
            assert set(threads.map(Worker.stop, workers)) == {0}
        eventually(lambda: not [pid for pid in processes if is_running(pid)], "the children's end")
        lists = WantedKeys(PROFILE, prefix)
        assert live(client, prefix) == 0
        assert not client.exists(TenantKeys(TENANT, prefix).live, lists.wanted)
        assert client.hkeys(lists.marks) == [""], "the counter, and no session"
        assert capsule.usage(TENANT).calls == 2 * sessions


def crowded(url: str, directory: Path, prefix: str, room: int) -> Worker:
    """A worker with room for a few sessions."""
    profiles = {PROFILE: {"max_live": room}}
    return code_worker(url, directory, capsule_prefix=prefix, capsule_code_profiles=profiles)


def live(client: redis.Redis, prefix: str) -> int:
    """How many named sessions the workers hold, as reapers would find them."""
    holds = list(client.scan_iter(f"{prefix}:{{W:*}}:sessions", count=1000))
    return sum(client.scard(hold) for hold in holds)


def descendants(pid: int) -> list[int]:
    """The processes that a worker has started, and those that these have."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        path = Path(f"/proc/{waiting[0]}/task")
        pids = " ".join(one.read_text() for one in path.glob("*/children")).split()
        del waiting[0]
        waiting += [int(one) for one in pids]
        found += [int(one) for one in pids]
    return found
