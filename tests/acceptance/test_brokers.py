"""A worker on each kind of broker: what it runs, says and holds there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from capsule_tasks.client import Execution
from capsule_tasks.protocol.messages import Output
from scripts._redis_server import PrivateServer
from tests.acceptance.workers import HANG_S, Worker, eventually, unique
from tests.tls import Certificates, tls_in_front_of


def is_whole(worker: Worker) -> None:
    """A task runs and has a stream, its message is held and let go, and a revoke is kept."""
    client, key = worker.app.backend.client, unique()
    execution = Execution.of(worker.send("speak", key))
    said = [event.message for event in execution.events()]
    text = "".join(message.data for message in said if isinstance(message, Output))
    assert f"printed {key}" in text
    held = worker.send("hold_late", key)
    worker.heard(key)
    eventually(lambda: client.hlen("unacked") == 1, "the note of what is held")
    worker.go(key)
    assert held.get(timeout=HANG_S) > 0
    eventually(lambda: not client.exists("unacked"), "the end of that note")
    revoked = unique()
    worker.tell("revoke", revoked)
    eventually(lambda: client.zscore("capsule:{revokes}", f"t{revoked}"), "the revoke in Redis")
    assert worker.stop() == 0


def test_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "redis.sock"
    with (
        PrivateServer(tmp_path / "redis", options={"unixsocket": str(path)}) as server,
        Worker(
            f"{server.url.removesuffix('0')}3",
            tmp_path,
            REDIS_URL=f"redis+socket://{path}?virtual_host=3",
        ) as worker,
    ):
        is_whole(worker)


@pytest.mark.parametrize(
    "of_broker", [None, {"ssl_cert_reqs": "required"}], ids=["unchecked", "checked"]
)
def test_tls_that_the_settings_describe(tmp_path: Path, of_broker: dict[str, Any] | None) -> None:
    certificates = Certificates(tmp_path)
    known = {"ssl_ca_certs": str(certificates.certificate)}
    settings: dict[str, Any] = {"redis_backend_use_ssl": {"ssl_cert_reqs": "required", **known}}
    if of_broker is not None:
        settings["broker_use_ssl"] = of_broker | known
    with (
        PrivateServer(tmp_path / "redis") as server,
        tls_in_front_of(server.port, certificates) as port,
        Worker(
            server.url,
            tmp_path,
            REDIS_URL=f"rediss://127.0.0.1:{port}/0",
            TEST_CONF=json.dumps(settings),
        ) as worker,
    ):
        is_whole(worker)
