"""Real workers keep runs going: what they find is sent to the queue of the run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from capsule_tasks.client.runs.messages import RUN_TASK, message_of
from capsule_tasks.durable import INPUT_SCHEMA, first_snapshot
from capsule_tasks.settings import LeaseSettings
from capsule_tasks.storage import ApprovalRequest, SyncRunStore
from capsule_tasks.testing.servers import PrivateServer
from tests.acceptance.workers import Worker, close, eventually, producer, unique

APP = "tests.acceptance.others.words_app"


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[tuple[PrivateServer, PrivateServer]]:
    """The broker, and the Redis of the runs."""
    with (
        PrivateServer(tmp_path / "broker", aof=True) as broker,
        PrivateServer(tmp_path / "runs", aof=True) as runs,
    ):
        yield broker, runs


class Elsewhere:
    """A queue that no worker consumes, so that a test can look at what is sent to it."""

    def __init__(self, broker_url: str, runs_url: str) -> None:
        self.queue = unique("elsewhere")
        self.app = producer(broker_url, self.queue)
        self._url = broker_url
        self.store = SyncRunStore(runs_url)

    def create(self, run_id: str) -> int:
        """Create a run and send no message, as a producer does that dies in between."""
        options = {"queue": self.queue, "priority": 3}
        message = message_of(self.app.signature(RUN_TASK, (), {"agent": "words"}, options=options))
        snapshot = first_snapshot(["work"])
        made = self.store.create(
            run_id, run_id, snapshot, schema=INPUT_SCHEMA, agent="words", message=message
        )
        return made.updated_us

    def owned(self, run_id: str, **ask: Any) -> None:
        """Have a run claimed by an owner that will not renew its lease, or park it."""
        self.store.note_sent(run_id, self.create(run_id))
        owner = f"{run_id}-owner"
        self.store.lease(owner, LeaseSettings(lease_s=3.0)).acquire()
        claim = self.store.claim(run_id, owner)
        if ask:
            call = ApprovalRequest(call_id="c", tool="t", agent="a", fingerprint="f", **ask)
            self.store.commit(claim, b"", turn=1, status="interrupted", approval_requests=[call])

    def noted(self, run_id: str) -> str:
        """The status of a run once its message is noted as sent."""
        read = self.store.read
        return str(
            eventually(
                lambda: not (record := read(run_id)).unsent_us and record.status,
                f"the note that the message of {run_id} was sent",
            )
        )

    def arrived(self) -> dict[str, dict[str, Any]]:
        """The messages in the queue, by task."""
        with redis.Redis.from_url(self._url) as client:
            found: list[Any] = []
            for key in client.scan_iter(f"{self.queue}*"):
                found += client.lrange(key, 0, -1)
        messages = [json.loads(each) for each in found]
        return {message["headers"]["id"]: message for message in messages}

    def close(self) -> None:
        self.store.close()
        close(self.app)


@pytest.fixture
def elsewhere(servers: tuple[PrivateServer, PrivateServer]) -> Iterator[Elsewhere]:
    made = Elsewhere(servers[0].url, servers[1].url)
    yield made
    made.close()


def worker_of(servers: tuple[PrivateServer, PrivateServer], folder: Path, **env: str) -> Worker:
    return Worker(servers[0].url, folder, app=APP, TEST_RUNS_URL=servers[1].url, **env)


def test_a_worker_sends_what_is_due_to_the_queue_of_each_run(
    servers: tuple[PrivateServer, PrivateServer], elsewhere: Elsewhere, tmp_path: Path
) -> None:
    elsewhere.create("unsent")
    elsewhere.owned("lapsed")
    elsewhere.owned("rejected", expires_in_s=0.5)
    elsewhere.owned("approved", expires_in_s=0.5, on_expiry="approve")
    elsewhere.owned("cancelled", expires_in_s=0.5, on_expiry="cancel")
    runs = {"unsent", "lapsed", "rejected", "approved", "cancelled"}
    with worker_of(servers, tmp_path) as worker:
        eventually(lambda: elsewhere.arrived().keys() == runs, "a message for each run")
        message = elsewhere.arrived()["lapsed"]
        assert message["headers"]["task"] == "capsule.run"
        assert message["properties"]["priority"] == 3
        for run_id in runs:
            status = "cancelled" if run_id == "cancelled" else "queued"
            assert elsewhere.noted(run_id) == status
        assert "run lapsed: its owner is gone; it is queued" in worker.log
        assert "run unsent is queued, and nobody had sent its message" in worker.log
        assert "run cancelled: the time limit of calls c has passed; it is cancelled" in worker.log
        assert worker.stop() == 0, worker.log


@pytest.mark.full
def test_a_worker_waits_for_broker_and_redis_in_turn(
    servers: tuple[PrivateServer, PrivateServer], elsewhere: Elsewhere, tmp_path: Path
) -> None:
    broker, runs = servers
    with worker_of(servers, tmp_path) as worker:
        elsewhere.create("first")
        port = broker.port
        broker.stop()
        eventually(lambda: "messages of runs cannot be sent, and wait" in worker.log, "a warning")
        assert elsewhere.store.read("first").unsent_us
        with PrivateServer(tmp_path / "broker", port=port, aof=True):
            eventually(lambda: "first" in elsewhere.arrived(), "the first message")
            elsewhere.owned("second")
            runs_port = runs.port
            runs.stop()
            eventually(lambda: "runs are not kept going" in worker.log, "a warning")
            with PrivateServer(tmp_path / "runs", port=runs_port, aof=True):
                eventually(lambda: "second" in elsewhere.arrived(), "the second message")
