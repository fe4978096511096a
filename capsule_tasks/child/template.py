"""A process that is kept warm to be copied: it imports what children need, then forks them.

A child is forked twice. The process in between exits at once, so the child is adopted by the
nearest subreaper, the process that owns the sessions: it gets the exit status, and whatever
becomes of the template, the child lives on.
"""

from __future__ import annotations

import ctypes
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

from capsule_tasks.child import sandbox
from capsule_tasks.child.main import main as live
from capsule_tasks.protocol.forking import MARKER_ROOM, Fork, Forked, Loaded
from capsule_tasks.system.family import MARKER
from capsule_tasks.system.prctl import die_with_parent

_REQUEST_BYTES = 1024 * 1024
_WIRES = 5
_RESET_SIGNALS = tuple(
    signum
    for signum in signal.valid_signals()
    if signum not in (signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, signal.SIGXFSZ)
)


def main(descriptor: int, parent_pid: int, *imports: str) -> NoReturn:
    """Serve the other end of the descriptor until it is closed; never returns."""
    os.set_inheritable(descriptor, False)
    die_with_parent(parent_pid)
    serve(socket.socket(fileno=descriptor), imports)


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
        sandbox.installed_paths()
        _settle_threads()
    except BaseException as fault:
        return Loaded(pid=os.getpid(), error=f"{type(fault).__name__}: {fault}")
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


def _serve(connection: socket.socket) -> None:
    decode = msgspec.msgpack.Decoder(Fork).decode
    while True:
        data, descriptors, _, _ = socket.recv_fds(connection, _REQUEST_BYTES, _WIRES)
        if not data:
            return
        request = decode(data)
        try:
            pid = _fork_twice(connection, request, descriptors)
        except OSError as fault:
            answer = Forked(id=request.id, error=str(fault))
        else:
            answer = Forked(id=request.id, pid=pid)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        connection.send(msgspec.msgpack.encode(answer))


def _fork_twice(connection: socket.socket, request: Fork, descriptors: list[int]) -> int:
    """The pid of a child that no longer is ours."""
    reading, writing = os.pipe()
    try:
        between = os.fork()
        if between == 0:
            _between(connection, request, descriptors, reading, writing)
        os.close(writing)
        writing = -1
        told = os.read(reading, 32)
        os.waitpid(between, 0)  # only now has the child been adopted
    finally:
        os.close(reading)
        if writing >= 0:
            os.close(writing)
    if not told:
        raise OSError("the second fork failed")
    return int(told)


def _between(
    connection: socket.socket,
    request: Fork,
    descriptors: list[int],
    reading: int,
    writing: int,
) -> NoReturn:
    try:
        between = os.getpid()
        pid = os.fork()
        if pid == 0:
            for descriptor in (connection.detach(), reading, writing):
                os.close(descriptor)
            _become_child(request, descriptors, between)
        os.write(writing, str(pid).encode())
    finally:
        os._exit(0)


def _become_child(request: Fork, descriptors: list[int], between: int) -> NoReturn:
    try:
        os.setsid()
        for signum in _RESET_SIGNALS:
            if signal.getsignal(signum) is not signal.SIG_DFL:
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
        while os.getppid() == between:
            os.sched_yield()
        live(control, bulk, stacks, request.parent_pid)
    except BaseException:
        os.write(2, f"the forked child failed: {traceback.format_exc()}".encode())
    finally:
        os._exit(70)


def _take_environment(request: Fork) -> None:
    """The child's own environment; its marker also where `/proc` shows it."""
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    place = libc.getenv(MARKER.encode())
    marker = request.marker.encode()
    if place and len(marker) < MARKER_ROOM and len(os.environ.get(MARKER, "")) == MARKER_ROOM:
        ctypes.memmove(place, marker.ljust(MARKER_ROOM, b"\0"), MARKER_ROOM)
    if request.env is not None:
        os.environ.clear()
        os.environ.update(request.env)
    os.environ[MARKER] = request.marker
