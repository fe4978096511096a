"""A server that stays when the command that started it has ended, until another one stops it.

The process is the truth. `server.json` in the server's directory only says which process to look
for: its pid and its start time together, so that a pid which the system has given to another
program since is taken for what it is, a server that is gone, and is never signalled. Needs Linux.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from capsule_tasks.errors import PrivateServerError
from capsule_tasks.testing.servers import PrivateServer, RunningServer

STOP_GRACE_S = 5.0


@dataclass(frozen=True)
class StayingServer(RunningServer):
    """A server, and when its process started."""

    start_ticks: int


def running_in(directory: Path) -> StayingServer | None:
    """The server that the directory's state speaks of, if its process is still alive."""
    try:
        state = StayingServer(**json.loads(_state_file(directory).read_bytes()))
    except FileNotFoundError:
        return None
    return state if start_ticks(state.pid) == state.start_ticks else None


def start_in(
    directory: Path, *, server: str | None = None, port: int | None = None, aof: bool = False
) -> StayingServer:
    """Start a server, chosen as for a PrivateServer; refuses where one runs."""
    directory = directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    with _exclusive(directory):
        if running := running_in(directory):
            raise PrivateServerError(
                f"a server runs in {directory} already: {running.url}, pid {running.pid}; "
                "stop it first or use another directory"
            )
        private = PrivateServer(directory, server=server, port=port, aof=aof)
        started = private.start()
        state = StayingServer(**asdict(started), start_ticks=start_ticks(started.pid) or 0)
        draft = _state_file(directory).with_suffix(".draft")
        draft.write_text(json.dumps(asdict(state), indent=2) + "\n")
        draft.replace(_state_file(directory))
        private.detach()
        return state


def stop_in(directory: Path) -> bool:
    """End the server, first politely, and say whether one was running; safe at any time."""
    if not directory.exists():
        return False
    with _exclusive(directory):
        running = running_in(directory)
        was_running = running is not None and end_process(running.pid, running.start_ticks)
        _state_file(directory).unlink(missing_ok=True)
        return was_running


def _state_file(directory: Path) -> Path:
    return directory / "server.json"


@contextlib.contextmanager
def _exclusive(directory: Path) -> Iterator[None]:
    """Two starts, or a start and a stop, in one directory come one after the other."""
    with (directory / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


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
                raise PrivateServerError(f"process {pid} outlived SIGKILL")
    except ProcessLookupError:
        return True
    else:
        return True
    finally:
        os.close(handle)


def _has_ended(handle: int, within_s: float) -> bool:
    return bool(select.select([handle], [], [], within_s)[0])
