"""scripts/redis, and the servers that it leaves behind, with a real server binary."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from capsule_tasks.errors import PrivateServerError
from capsule_tasks.testing.servers import RunningServer, ask_server
from scripts import _redis_server
from scripts._redis_server import StayingServer, running_in, start_in, start_ticks, stop_in

COMMAND = Path(__file__).parents[2] / "scripts" / "redis"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The directory of a server that stays."""
    yield tmp_path / "server"
    stop_in(tmp_path / "server")


def is_alive(running: StayingServer) -> bool:
    return start_ticks(running.pid) == running.start_ticks


def test_a_server_that_stays_is_known_by_its_directory_and_stopped_there(folder: Path) -> None:
    assert not stop_in(folder)
    assert running_in(folder) is None
    running = start_in(folder)
    assert running_in(folder) == running
    assert stop_in(folder)
    assert not is_alive(running)
    assert running_in(folder) is None
    assert not stop_in(folder)


def test_a_pid_that_now_belongs_to_another_program_is_left_alone(folder: Path) -> None:
    running = start_in(folder)
    stop_in(folder)
    with subprocess.Popen(["sleep", "60"]) as stranger:
        state = replace(running, pid=stranger.pid)
        (folder / "server.json").write_text(json.dumps(asdict(state)))
        assert running_in(folder) is None
        assert not stop_in(folder)
        assert stranger.poll() is None
        stranger.kill()


def test_a_second_start_in_one_directory_is_refused(folder: Path) -> None:
    running = start_in(folder)
    with pytest.raises(PrivateServerError, match=str(running.pid)):
        start_in(folder)
    assert is_alive(running)


def test_a_server_that_ignores_the_request_is_killed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_redis_server, "STOP_GRACE_S", 0.2)
    running = start_in(folder)
    os.kill(running.pid, signal.SIGSTOP)
    assert stop_in(folder)
    assert not is_alive(running)


def test_command_starts_tells_and_stops(tmp_path: Path) -> None:
    where = ["--dir", "relative", "--json"]
    started = json.loads(command(tmp_path, "start", *where).stdout)
    try:
        assert started["directory"] == str(tmp_path / "relative")
        assert ask_server(started["port"])
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
        socket.create_connection(("127.0.0.1", port), timeout=5)


def test_a_terminated_run_leaves_neither_server_nor_folder(tmp_path: Path) -> None:
    with subprocess.Popen(
        [COMMAND, "run", "--json"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        running = RunningServer(**json.loads(process.stdout.readline()))
        assert start_ticks(running.pid) is not None
        process.terminate()
    assert process.returncode == 128 + signal.SIGTERM
    assert start_ticks(running.pid) is None
    assert not Path(running.directory).exists()


def command(cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, *words], cwd=cwd, capture_output=True, text=True, timeout=60, check=False
    )
