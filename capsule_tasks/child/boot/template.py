"""A process that is kept warm to be copied: it imports what children need, then forks them.

A child is forked twice. The process in between exits at once, so the child is adopted by the
nearest subreaper, the process that owns the sessions: it gets the exit status, and whatever
becomes of the template, the child lives on.
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
from capsule_tasks.child.main import main as live
from capsule_tasks.protocol.codec import decoder_of
from capsule_tasks.protocol.forking import MARKER_ROOM, Fork, Forked, Loaded
from capsule_tasks.protocol.messages import ToChild
from capsule_tasks.system import descriptors
from capsule_tasks.system.family import MARKER
from capsule_tasks.system.prctl import die_with_parent, libc

_REQUEST_BYTES = 1024 * 1024
_WIRES = 5
_LEFT_ALONE = (signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, signal.SIGXFSZ)
_ENV_START = 47
"""Of the fields of `/proc/self/stat` behind the name of the program."""
_places: list[int] = []
"""Where a copy of its caller has made room for the marker."""


def main(descriptor: int, parent_pid: int, *imports: str) -> NoReturn:
    """Serve the other end of the descriptor until it is closed; never returns."""
    os.set_inheritable(descriptor, False)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # as for a child
    die_with_parent(parent_pid)
    serve(socket.socket(fileno=descriptor), imports)


def leave_caller(kept: int) -> None:
    """Give up what a copy must not share with its original, but for one descriptor."""
    _drop_descriptors(kept)
    _make_room_for_marker()


def _drop_descriptors(kept: int) -> None:
    """Have /dev/null at the number of what a copy does not keep of its original.

    No number becomes free: the original's objects live on in the copy, and what they close when
    they are collected must not be a wire of a session, or a file of its user.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for number, target in descriptors.targets().items():
        if number > 2 and number not in (kept, null) and not descriptors.is_kept(number, target):
            os.dup2(null, number, inheritable=False)


def _make_room_for_marker() -> None:
    """Free the start of what `/proc` shows as the environment, as `fresh` templates are given it.

    What the C library finds there moves to the heap first. A block that is too small stays as it
    is: then descendants are known by their session and their parents alone.
    """
    for name, value in os.environ.items():
        os.putenv(name, value)
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[_ENV_START]), int(fields[_ENV_START + 1])
    room = f"{MARKER}={'-' * MARKER_ROOM}".encode() + b"\0"
    if end - start >= len(room):
        ctypes.memmove(start, room, len(room))
        _places.append(start + len(MARKER) + 1)


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


def _load(imports: tuple[str, ...]) -> Loaded:
    try:
        for name in imports:
            importlib.import_module(name)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # or every copy would write what is buffered here
        sandbox.needed_paths()
        decoder_of(ToChild)
        _settle_threads()
    except BaseException as fault:
        return Loaded(pid=os.getpid(), error=f"{type(fault).__name__}: {fault}")
    _handled_signals()
    gc.collect()
    gc.freeze()  # what all children share is not copied by their collectors
    return Loaded(pid=os.getpid())


def _settle_threads() -> None:
    """RuntimeError if a thread is left that a fork would cut off in the middle of its work.

    Libraries that are made to be forked (OpenBLAS, say) end their threads in a handler that runs
    before a fork; a first fork that does nothing gives them the occasion.
    """
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    ours = [thread.name for thread in threading.enumerate()]
    if len(ours) > 1:
        raise RuntimeError(f"the imports left Python threads running: {', '.join(ours[1:])}")
    native = _native_threads()
    if native > 1:
        raise RuntimeError(f"the imports left {native - 1} native threads that survive a fork")


def _native_threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 1


class _SpareChild:
    """A copy made ahead of time, which waits to be told whose child it is.

    Until then it is in the template's POSIX session, and ends when the template does.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self.pid = self._fork_twice(connection, theirs)
        except BaseException:
            self._ours.close()
            raise
        finally:
            theirs.close()

    def send(self, data: bytes, descriptors: list[int]) -> None:
        """Have it become the child that `data` describes; OSError if it is gone."""
        with self._ours:
            socket.send_fds(self._ours, [data], descriptors)

    def _fork_twice(self, connection: socket.socket, orders: socket.socket) -> int:
        """The pid of a process that no longer is ours."""
        reading, writing = socket.socketpair()
        with reading, writing:
            between = os.fork()
            if between == 0:
                self._fork_again((connection, self._ours, reading), orders, writing)
            writing.close()
            told = reading.recv(32)
            os.waitpid(between, 0)  # only now has it been adopted
        if not told:
            raise OSError("the second fork failed")
        return int(told)

    def _fork_again(
        self, not_its: tuple[socket.socket, ...], orders: socket.socket, writing: socket.socket
    ) -> NoReturn:
        try:
            between = os.getpid()
            pid = os.fork()
            if pid == 0:
                for sock in (*not_its, writing):
                    sock.close()
                _await_request(orders, between)
            writing.send(str(pid).encode())
        finally:
            os._exit(0)


def _serve(connection: socket.socket) -> None:
    decode = msgspec.msgpack.Decoder(Fork).decode
    spare: _SpareChild | None = None
    while True:
        if spare is None:
            with contextlib.suppress(OSError):  # whoever needs one will hear why there is none
                spare = _SpareChild(connection)
        data, descriptors, _, _ = socket.recv_fds(connection, _REQUEST_BYTES, _WIRES)
        if not data:
            return
        request = decode(data)
        try:
            pid = _send_descriptors(spare, connection, data, descriptors)
        except OSError as fault:
            answer = Forked(id=request.id, error=str(fault))
        else:
            answer = Forked(id=request.id, pid=pid)
        finally:
            spare = None
            for descriptor in descriptors:
                os.close(descriptor)
        with contextlib.suppress(ConnectionError):  # it has closed its end, and is read no more
            connection.send(msgspec.msgpack.encode(answer))


def _send_descriptors(
    spare: _SpareChild | None, connection: socket.socket, data: bytes, descriptors: list[int]
) -> int:
    """The pid of the copy that becomes the child."""
    if spare is not None:
        with contextlib.suppress(OSError):  # it was killed while it waited
            spare.send(data, descriptors)
            return spare.pid
    spare = _SpareChild(connection)
    spare.send(data, descriptors)
    return spare.pid


def _await_request(orders: socket.socket, between: int) -> NoReturn:
    try:
        while os.getppid() == between:
            os.sched_yield()
        _reseed()
        with orders:
            data, descriptors, _, _ = socket.recv_fds(orders, _REQUEST_BYTES, _WIRES)
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
        live(control, bulk, stacks, request.parent_pid)
    except BaseException:
        os.write(2, f"the forked child failed: {traceback.format_exc()}".encode())
    finally:
        os._exit(70)


@functools.cache
def _handled_signals() -> tuple[int, ...]:
    """Those that do not have their default effect: what the imports left, the same for all."""
    candidates = signal.valid_signals().difference(_LEFT_ALONE)
    return tuple(n for n in candidates if signal.getsignal(n) is not signal.SIG_DFL)


def _reseed() -> None:
    """NumPy's global generator would draw the same numbers in every copy; Python's own does not."""
    numbers = sys.modules.get("numpy.random")
    if numbers is not None:
        numbers.seed()


def _take_environment(request: Fork) -> None:
    """The child's own environment; its marker also where `/proc` shows it."""
    marker = request.marker.encode()
    if len(marker) < MARKER_ROOM and (place := _place_of_marker()):
        ctypes.memmove(place, marker.ljust(MARKER_ROOM, b"\0"), MARKER_ROOM)
    if request.env is not None:
        os.environ.clear()
        os.environ.update(request.env)
    os.environ[MARKER] = request.marker


def _place_of_marker() -> int | None:
    if _places:
        return _places[0]
    if len(os.environ.get(MARKER, "")) != MARKER_ROOM:
        return None
    assert libc is not None
    libc.getenv.restype = ctypes.c_void_p
    place: int | None = libc.getenv(MARKER.encode())
    return place
