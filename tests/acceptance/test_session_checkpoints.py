"""Checkpoints of named sessions that real workers make, behind URLs and in Redis, up to 100 MB."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from moto.server import ThreadedMotoServer

from capsule_tasks import Capsule, Execution
from capsule_tasks.client.sessions.named_session import NamedSession
from capsule_tasks.protocol.events import SessionRestored
from tests.acceptance.test_code import code_worker
from tests.acceptance.workers import HANG_S, Worker, eventually
from tests.servers import fresh_prefix

LEASE_S = 1.0
MB = 1_000_000
BUCKET = "checkpoints"
MAKE = "import hashlib, os, random\ndata = random.Random(7).randbytes({size})\n" + (
    DIGEST := "hashlib.sha256(data).hexdigest(), os.getpid()"
)


def restored(execution: Execution) -> list[SessionRestored]:
    """What the call was told of the namespace that it found."""
    messages = [event.message for event in execution.events()]
    return [message for message in messages if isinstance(message, SessionRestored)]


@contextmanager
def two_workers(url: str, directory: Path, where: str) -> Iterator[tuple[Worker, NamedSession]]:
    """Two workers whose checkpoints are behind a URL; the first of them has the session."""
    conf: dict[str, Any] = {
        "capsule_prefix": fresh_prefix(),
        "capsule_checkpoints": where,
        "capsule_lease_s": LEASE_S,
    }
    with code_worker(url, directory, **conf) as first:
        first.app.conf.update(conf)
        session = Capsule(first.app).session("moves")
        session.execute("n = 41").get(timeout=HANG_S)
        with code_worker(url, directory, queue=first.queue, **conf):
            yield first, session


def check_no_bytes_in_redis(url: str, prefix: str) -> None:
    with redis.Redis.from_url(url, decode_responses=True) as client:
        assert client.exists(f"{prefix}:{{S:moves}}:session")
        assert list(client.scan_iter(f"{prefix}:*:checkpoint:*", count=1000)) == []


# --- behind URLs ---------------------------------------------------------------------------------


def test_a_session_moves_by_a_directory(redis_url: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    with two_workers(redis_url, tmp_path, f"file://{folder}") as (first, session):
        first.stop()
        call = session.execute("n += 1\nn")
        assert call.get(timeout=HANG_S) == 42
        assert [each.saved_at is not None for each in restored(call)] == [True]
        check_no_bytes_in_redis(redis_url, first.app.conf.capsule_prefix)
        session.checkpoint()
        eventually(lambda: len(files_in(folder)) == 1, "one checkpoint")
        Capsule(first.app).forget(session=session.id)
        assert files_in(folder) == []


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A bucket of an S3-compatible server, for this process and for workers it starts."""
    import s3fs

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    files = s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False)
    files.mkdir(BUCKET)
    yield files
    server.stop()


def test_a_session_moves_by_an_object_store(redis_url: str, tmp_path: Path, bucket: Any) -> None:
    """Its worker is killed; what it saved on demand comes back, larger than one part of S3."""
    where = f"s3://{BUCKET}/sessions"
    with two_workers(redis_url, tmp_path, where) as (first, session):
        digest, _ = session.execute(MAKE.format(size=12 * MB)).get(timeout=HANG_S)
        assert {"n", "data"} <= set(session.checkpoint().saved)
        first.kill()
        call = session.execute(f"n += 1\nn, {DIGEST}")
        n, found, _ = call.get(timeout=HANG_S)
        assert (n, found) == (42, digest)
        assert [each.saved_at is not None for each in restored(call)] == [True]
        check_no_bytes_in_redis(redis_url, first.app.conf.capsule_prefix)
        session.checkpoint()
        eventually(lambda: len(bucket.find(BUCKET)) == 1, "one checkpoint")
        Capsule(first.app).forget(session=session.id)
        assert bucket.find(BUCKET) == []


# --- large ones ----------------------------------------------------------------------------------


def test_a_large_namespace_is_evicted_and_restored(redis_url: str, tmp_path: Path) -> None:
    conf = {
        "capsule_prefix": fresh_prefix(),
        "capsule_code_profiles": {"sandbox": {"max_live": 1}},
    }
    with code_worker(redis_url, tmp_path, **conf) as worker:
        worker.app.conf.update(conf)
        capsule = Capsule(worker.app)
        large, other = capsule.session("large"), capsule.session("other")
        digest, child = large.execute(MAKE.format(size=100 * MB)).get(timeout=HANG_S)
        assert other.execute("6 * 7").get(timeout=HANG_S) == 42
        assert not large.info().owner
        call = large.execute(DIGEST)
        found, new_child = call.get(timeout=HANG_S)
        assert found == digest
        assert new_child != child
        (told,) = restored(call)
        assert (told.lost_calls, told.lost) == (0, ())
        assert not other.info().owner
        capsule.forget(session="large")
