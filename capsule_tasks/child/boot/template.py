"""The template of children: a process that imports their modules once, and then forks them.

A child is forked twice. The process in between exits at once, so that the nearest subreaper, which
is the process that owns the sessions, adopts the child. That process gets the exit status of the
child, and the child lives on if the template ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import os
import signal
import socket
import sys
import threading
import traceback
from typing import NoReturn

import msgspec

from capsule_tasks.child.boot import sandbox
from capsule_tasks.child.main import main as child_main
from capsule_tasks.protocol.codec import decoder_of
from capsule_tasks.protocol.forking import MARKER_ROOM, Fork, Forked
from capsule_tasks.protocol.messages import ToChild
from capsule_tasks.system import descriptors
from capsule_tasks.system.family import MARKER
from capsule_tasks.system.prctl import die_with_parent, libc

_REQUEST_BYTES = 1024 * 1024
_MAX_DESCRIPTORS = 5
_UNCHANGED_SIGNALS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, signal.SIGXFSZ)
_ENV_START = 47
"""Field of `/proc/self/stat`, counted from the one behind the program's name."""
_marker_addresses: list[int] = []
"""Set in a copy of the caller, which has made room for the marker."""


def main(descriptor: int, parent_pid: int, *imports: str) -> NoReturn:
    """Serve the other end of the descriptor until it is closed; never returns."""
    os.set_inheritable(descriptor, False)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the thread that started this may block signals
    die_with_parent(parent_pid)
    serve(socket.socket(fileno=descriptor), imports)


def detach_from_caller(descriptor: int) -> None:
    """Give up what a copy must not share with its original, except one descriptor.

    The others are replaced by /dev/null, so that no number becomes free. Objects of the original
    live on in the copy, and close their descriptor when they are collected: by then its number
    could be a channel of a session, or a user's file.
    """
    null = os.open(os.devnull, os.O_RDWR)
    kept = (0, 1, 2, null, descriptor)
    for number, target in descriptors.targets().items():
        if number not in kept and not descriptors.is_kept(number, target):
            os.dup2(null, number, inheritable=False)
    _make_room_for_marker()


def _make_room_for_marker() -> None:
    """Free the start of the block that `/proc` shows as the environment.

    Templates that are not copies are started with a placeholder there. The variables in the block
    are copied to the heap first. A block that is too small stays as it is: then descendants are
    found by their POSIX session and their parents only.
    """
    for name, value in os.environ.items():
        os.putenv(name, value)
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[_ENV_START]), int(fields[_ENV_START + 1])
    room = f"{MARKER}={'-' * MARKER_ROOM}".encode() + b"\0"
    if end - start >= len(room):
        ctypes.memmove(start, room, len(room))
        _marker_addresses.append(start + len(MARKER) + 1)


def serve(connection: socket.socket, imports: tuple[str, ...]) -> NoReturn:
    status = 70
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        connection.send(msgspec.msgpack.encode(_load(imports)))
        _serve(connection)
        status = 0
    except BaseException as fault:
        sys.stderr.write(f"the template failed: {type(fault).__name__}: {fault}\n")
        sys.stderr.flush()
    finally:
        os._exit(status)


def _load(imports: tuple[str, ...]) -> Forked:
    try:
        for name in imports:
            importlib.import_module(name)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # or each copy would write the buffered text
        sandbox.needed_paths()
        decoder_of(ToChild)
        _end_threads()
    except BaseException as fault:
        return Forked(error=f"{type(fault).__name__}: {fault}")
    _handled_signals()
    gc.collect()
    gc.freeze()  # so that the collectors of children do not copy the shared pages
    return Forked()


def _end_threads() -> None:
    """Have libraries end their threads; RuntimeError if a thread is left.

    A forked child would lack such a thread, and have its locks as they were at the fork. Libraries
    that support forks (OpenBLAS, say) end their threads in a handler that runs before a fork. So
    the first fork only has them do that.
    """
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    ours = [thread.name for thread in threading.enumerate()]
    if len(ours) > 1:
        raise RuntimeError(f"the imports left Python threads running: {', '.join(ours[1:])}")
    with contextlib.suppress(OSError):  # there is no /proc here
        native = len(os.listdir("/proc/self/task"))
        if native > 1:
            raise RuntimeError(f"the imports left {native - 1} native threads that survive a fork")


class _SpareChild:
    """A copy made ahead of time, which waits for the request that makes it a child.

    Until then it is in the template's POSIX session, and ends when the template does.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._our_end, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its_end, contextlib.ExitStack() as undo:
            undo.enter_context(self._our_end)
            between = os.fork()
            if between == 0:
                self._fork_again(connection, its_end)
            its_end.close()
            os.waitpid(between, 0)  # only now has the subreaper adopted the copy
            answer = self._our_end.recv(32)
            if not answer:
                raise OSError("the second fork failed")
            self.pid = int(answer)
            undo.pop_all()

    def send(self, data: bytes, descriptors: list[int]) -> None:
        """Have the copy become the child that `data` describes; OSError if the copy has ended."""
        with self._our_end:
            socket.send_fds(self._our_end, [data], descriptors)

    def _fork_again(self, connection: socket.socket, requests: socket.socket) -> NoReturn:
        try:
            between = os.getpid()
            if os.fork() == 0:
                connection.close()
                self._our_end.close()
                _await_request(requests, between)
        finally:
            os._exit(0)


def _serve(connection: socket.socket) -> None:
    decode = msgspec.msgpack.Decoder(Fork).decode
    while True:
        spare: _SpareChild | None = None
        with contextlib.suppress(OSError):  # the request tries again, and reports the error
            spare = _SpareChild(connection)
        data, descriptors, _, _ = socket.recv_fds(connection, _REQUEST_BYTES, _MAX_DESCRIPTORS)
        if not data:
            return
        answer = Forked(id=decode(data).id)
        try:
            answer.pid = _send_descriptors(spare, connection, data, descriptors)
        except OSError as fault:
            answer.error = str(fault)
        for descriptor in descriptors:
            os.close(descriptor)
        with contextlib.suppress(ConnectionError):  # the parent has closed its end
            connection.send(msgspec.msgpack.encode(answer))


def _send_descriptors(
    spare: _SpareChild | None, connection: socket.socket, data: bytes, descriptors: list[int]
) -> int:
    """The pid of the copy that becomes the child."""
    if spare is not None:
        with contextlib.suppress(OSError):  # the copy was killed while it waited
            spare.send(data, descriptors)
            return spare.pid
    spare = _SpareChild(connection)
    spare.send(data, descriptors)
    return spare.pid


def _await_request(requests: socket.socket, between: int) -> NoReturn:
    try:
        while os.getppid() == between:
            os.sched_yield()
        if numbers := sys.modules.get("numpy.random"):
            # Python's own generator is seeded by a handler of the fork. Without this, NumPy's
            # global generator would draw the same numbers in every copy.
            numbers.seed()
        with requests:
            requests.send(str(os.getpid()).encode())
            data, descriptors, _, _ = socket.recv_fds(requests, _REQUEST_BYTES, _MAX_DESCRIPTORS)
        if data:
            _become_child(msgspec.msgpack.decode(data, type=Fork), descriptors)
    finally:
        os._exit(0)


def _become_child(request: Fork, descriptors: list[int]) -> NoReturn:
    try:
        for signum in _handled_signals():
            signal.signal(signum, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        control, bulk, stacks, out, err = descriptors
        null = os.open(os.devnull, os.O_RDONLY)
        for descriptor, number in ((null, 0), (out, 1), (err, 2)):
            os.dup2(descriptor, number)
            os.close(descriptor)
        _take_environment(request)
        if request.cwd is not None:
            os.chdir(request.cwd)
        child_main(control, bulk, stacks, request.parent_pid)
    except BaseException:
        os.write(2, f"the forked child failed: {traceback.format_exc()}".encode())
    finally:
        os._exit(70)


@functools.cache
def _handled_signals() -> tuple[int, ...]:
    """Signals without their default effect. Cached: all children inherit the same from imports."""
    candidates = signal.valid_signals().difference(_UNCHANGED_SIGNALS)
    return tuple(n for n in candidates if signal.getsignal(n) is not signal.SIG_DFL)


def _take_environment(request: Fork) -> None:
    """Set the child's own environment, and write its marker to where `/proc` shows it."""
    marker = request.marker.encode()
    if len(marker) < MARKER_ROOM and (address := _marker_address()):
        ctypes.memmove(address, marker.ljust(MARKER_ROOM, b"\0"), MARKER_ROOM)
    if request.env is not None:
        os.environ.clear()
        os.environ.update(request.env)
    os.environ[MARKER] = request.marker


def _marker_address() -> int | None:
    if _marker_addresses:
        return _marker_addresses[0]
    if len(os.environ.get(MARKER, "")) != MARKER_ROOM:
        return None
    assert libc is not None
    libc.getenv.restype = ctypes.c_void_p
    address: int | None = libc.getenv(MARKER.encode())
    return address
