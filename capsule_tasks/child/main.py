"""Start of a child: the handshake, then the threads, then the executor until the end."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import logging
import os
import sched
import signal
import socket
import sys
import time
from typing import NoReturn

import msgspec

from capsule_tasks.child.boot import limits
from capsule_tasks.child.control import ControlThread
from capsule_tasks.child.executors.code import CodeExecutor, fresh_main
from capsule_tasks.child.executors.end_reporter import EndReporter
from capsule_tasks.child.executors.executor import Executor
from capsule_tasks.child.io.capture import Capture
from capsule_tasks.child.io.input import InputRequests
from capsule_tasks.child.io.sink import OutputSink
from capsule_tasks.child.outbox import Outbox
from capsule_tasks.child.registry import Registry
from capsule_tasks.child.stopping.interrupter import Interrupter
from capsule_tasks.errors import BadFrame, Unconfined
from capsule_tasks.protocol import messages
from capsule_tasks.protocol.codec import HEADER, MessageDecoder
from capsule_tasks.protocol.messages import ErrorKind, Hello, Ready, ToChild
from capsule_tasks.protocol.values import sendable
from capsule_tasks.settings import ChildSettings
from capsule_tasks.system.family import kill_descendants
from capsule_tasks.system.prctl import DEATH_SIGNAL, become_subreaper, die_with_parent

STACK_SIGNAL = signal.SIGWINCH
"""Asks `faulthandler` for all stacks, which needs no GIL. Ignored by default."""

EXIT_INCOMPATIBLE = 76
"""EX_PROTOCOL: no common version."""

EXIT_UNCONFINED = 77
"""EX_NOPERM: the sandbox cannot keep its promises here."""

log = logging.getLogger("capsule_tasks.child")


def main(control_fd: int, bulk_fd: int, stack_fd: int, parent_pid: int) -> NoReturn:
    """Serve the parent at the other end of the descriptors; never returns."""
    for descriptor in (control_fd, bulk_fd, stack_fd):
        os.set_inheritable(descriptor, False)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the thread that started this may block signals
    die_with_parent(parent_pid)
    become_subreaper()
    faulthandler.enable(file=stack_fd)
    faulthandler.register(STACK_SIGNAL, file=stack_fd, all_threads=True)
    control, bulk = socket.socket(fileno=control_fd), socket.socket(fileno=bulk_fd)
    try:
        hello = _await_hello(control)
    except ConnectionError:
        os._exit(0)  # the parent closed the channel before the handshake
    # A forked child leads a POSIX session only now: until its Hello it ends with its template.
    if os.getsid(0) != os.getpid():
        os.setsid()
    flush_interval_s = hello.config.output.flush_interval_s
    outbox = Outbox(control, bulk, hello.config.max_frame_bytes, flush_interval_s)
    version = next((version for version in hello.versions if version in messages.VERSIONS), None)
    if version is None:
        theirs, ours = list(hello.versions), list(messages.VERSIONS)
        reason = f"the parent supports versions {theirs}, this child {ours}"
        outbox.control(messages.Rejected(kind=ErrorKind.INCOMPATIBLE_PROTOCOL, message=reason))
        os._exit(EXIT_INCOMPATIBLE)
    _close_channels_in_forks(control, bulk, stack_fd)
    try:
        config, isolation = _confine(hello.config)
    except Unconfined as fault:
        outbox.control(messages.Rejected(kind=ErrorKind.UNCONFINED, message=str(fault)))
        os._exit(EXIT_UNCONFINED)
    ready = Ready(
        session_id=hello.session_id,
        version=version,
        pid=os.getpid(),
        capabilities=tuple(sorted(set(messages.CAPABILITIES).intersection(hello.capabilities))),
        config=_without_secrets(config),
        python=sys.version.split()[0],
        isolation=isolation,
    )
    _run_session(config, ready, outbox)
    kill_descendants(os.getpid())
    with contextlib.suppress(ChildProcessError):
        while True:  # orphans that this subreaper adopted; else they would go to the parent
            os.waitpid(-1, 0)
    os._exit(0)


def _confine(config: ChildSettings) -> tuple[ChildSettings, tuple[str, ...]]:
    """Apply limits and sandbox while there is one thread; what holds now, and what confines."""
    config = msgspec.structs.replace(config, limits=limits.apply(config.limits))
    if config.sandbox is None:
        return config, ()
    from capsule_tasks.child.boot import sandbox

    return config, sandbox.apply(config.sandbox)


def _run_session(config: ChildSettings, ready: Ready, outbox: Outbox) -> None:
    sys.setswitchinterval(config.executor.switch_interval_s)
    session_sink = OutputSink(None, outbox, config.output)
    registry, timers = Registry(), sched.scheduler(time.monotonic)
    capture = Capture(session_sink, lambda: [e.sink for e in registry.running()])
    inputs = InputRequests(outbox, capture.owner, config.input.timeout_s)
    interrupter = Interrupter(timers)
    end_reporter = EndReporter(registry, outbox, interrupter, inputs, config.limits)
    capture.install()
    outbox.pump.start()
    if config.tasks is None:
        sys.argv = [""]
        sys.modules["__main__"] = fresh_main()
    module = sys.modules["__main__"]
    inputs.install()
    parts = (registry, outbox, end_reporter, capture, interrupter)
    executor: Executor
    if config.tasks is None:
        _log_to(session_sink, config)
        limit = config.executor.async_limit
        executor = CodeExecutor(*parts, module=module, async_limit=limit)
    else:
        from capsule_tasks.child.executors import celery_app

        executor = celery_app.make_executor(config.tasks, capture, *parts)
    interrupter.install(executor.current)
    ControlThread(
        outbox=outbox,
        registry=registry,
        executor=executor,
        interrupter=interrupter,
        inputs=inputs,
        end_reporter=end_reporter,
        session_sink=session_sink,
        namespace=module.__dict__,
        config=config,
        timers=timers,
    ).start()
    # DEBUG in a pool, whose children start often, and all with the same settings.
    level = logging.DEBUG if config.tasks else logging.INFO
    log.log(level, "effective settings: %s", _without_secrets(config))
    ready.timestamp = time.monotonic()
    outbox.control(ready)
    executor.run()
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()  # noqa: SLF001 - the interpreter's own exit waits for threads
    session_sink.finish()


def _without_secrets(config: ChildSettings) -> ChildSettings:
    """The settings that may be logged: those of a Celery app hold passwords."""
    return msgspec.structs.replace(config, tasks=None)


def _await_hello(control: socket.socket) -> Hello:
    header = _exactly(control, HEADER)
    frame = header + _exactly(control, int.from_bytes(header, "big"))
    (message,) = MessageDecoder(ToChild, len(frame)).feed(frame)
    if not isinstance(message, Hello):
        raise BadFrame(f"the parent opened with a {type(message).__name__}, not with Hello")
    return message


def _exactly(control: socket.socket, size: int) -> bytes:
    data = control.recv(size, socket.MSG_WAITALL)
    if len(data) < size:
        raise ConnectionError("the parent closed the control channel")
    return data


def _close_channels_in_forks(control: socket.socket, bulk: socket.socket, stack_fd: int) -> None:
    """Have processes that user code forks neither keep the channels open nor write to them."""

    def close() -> None:
        if control.fileno() < 0:
            return  # a fork of a fork: its parent has closed them
        faulthandler.disable()
        faulthandler.unregister(STACK_SIGNAL)
        for signum in (signal.SIGURG, STACK_SIGNAL, DEATH_SIGNAL):
            signal.signal(signum, signal.SIG_DFL)
        for sock in (control, bulk):
            sock.close()
        os.close(stack_fd)

    os.register_at_fork(after_in_child=close)


def _log_to(sink: OutputSink, config: ChildSettings) -> None:
    """Write log records of the child as session output, never as output of an execution."""

    def write(record: logging.LogRecord) -> None:
        sink.accept([(None, "stderr", sendable(handler.format(record) + "\n"))])

    handler = logging.Handler()
    handler.emit = write  # type: ignore[method-assign]
    ours = logging.getLogger("capsule_tasks")
    ours.addHandler(handler)
    ours.setLevel(config.diagnostics.log_level)
    ours.propagate = False
