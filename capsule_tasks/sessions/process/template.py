"""Templates: asks them for children, notices their end, and starts children cold without one.

A template serves one event loop. It is a spawner: while it lives, a child costs two forks. After
its end, or if it cannot be forked because of what it imported, `spawn` raises TemplateLost and
`TemplateSpawner` starts its children cold. The children are adopted by this process, a subreaper,
and live on after the end of their template.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import NoReturn

import msgspec

from capsule_tasks.errors import TemplateLost, reason_of
from capsule_tasks.protocol.forking import MARKER_ROOM, Fork, Forked
from capsule_tasks.sessions.process.child_process import (
    SOURCE_ROOT,
    ChildDescriptors,
    ColdSpawner,
    Spawned,
)
from capsule_tasks.settings import Profile, SessionConfig
from capsule_tasks.system.family import MARKER, kill_members
from capsule_tasks.system.portable import IS_LINUX
from capsule_tasks.system.prctl import become_subreaper

log = logging.getLogger("capsule_tasks.sessions")

_BOOT = (
    "import sys; root, fd, parent, *imports = sys.argv[1:]; sys.path.append(root); "
    "from capsule_tasks.child.boot.template import main; main(int(fd), int(parent), *imports)"
)
_ANSWER_BYTES = 64 * 1024
_MIN_RETRY_S = 0.5
_MAX_RETRY_S = 30.0


class Template:
    """One template process. Make it with `fresh` or `fork_of_caller`, then `load` it on a loop."""

    def __init__(self, connection: socket.socket, pid: int, name: str) -> None:
        connection.setblocking(False)
        self.pid = pid
        self.name = name
        self._exited: asyncio.Future[str] | None = None
        self._connection = connection
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[int]] = {}
        self._children: set[int] = set()
        """Children whose pid a caller knows and will collect."""

    @classmethod
    def fresh(
        cls,
        imports: Sequence[str] = (),
        *,
        python: str,
        env: Mapping[str, str] | None = None,
    ) -> Template:
        """A new interpreter, with nothing but `env` and its imports."""
        become_subreaper()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            environment = dict(os.environ if env is None else env)
            environment[MARKER] = "-" * MARKER_ROOM
            arguments = [str(theirs.fileno()), str(os.getpid()), *imports]
            try:
                popen = subprocess.Popen(
                    [python, "-c", _BOOT, SOURCE_ROOT, *arguments],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    env=environment,
                    start_new_session=True,
                )
            except BaseException:
                ours.close()
                raise
        popen.returncode = 0  # this class collects the status itself
        return cls(ours, popen.pid, f"fresh({', '.join(imports)})")

    @classmethod
    def fork_of_caller(cls) -> Template:
        """A fork of this process as it is now. The process should have no other thread.

        It is forked all the same, as `multiprocessing` would: a lock that another thread holds at
        this moment stays locked in every child.
        """
        become_subreaper()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent_pid = os.getpid()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # a stream of the caller's own, with any error
                stream.flush()  # or every child would write the buffered text
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            _be_template(theirs, parent_pid)
        theirs.close()
        return cls(ours, pid, "fork of the worker")

    async def load(self, timeout_s: float) -> None:
        """Wait until the template has its imports; TemplateLost says why it cannot be forked."""
        loop = asyncio.get_running_loop()
        self._exited = loop.create_future()
        self._answers[0] = loaded = loop.create_future()
        loop.add_reader(self._connection, self._on_readable)
        try:
            async with asyncio.timeout(timeout_s):
                await loaded
        except BaseException as fault:
            self._end("it was not loaded")
            if isinstance(fault, TimeoutError):
                raise TemplateLost(self.name, f"not loaded within {timeout_s} s") from None
            raise

    @property
    def is_usable(self) -> bool:
        return self._exited is not None and not self._exited.done()

    async def ended(self) -> str:
        """Wait for the end of the template; why it ended."""
        assert self._exited is not None
        return await asyncio.shield(self._exited)

    async def spawn(
        self, descriptors: ChildDescriptors, config: SessionConfig, marker: str
    ) -> Spawned:
        if not self.is_usable:
            raise TemplateLost(self.name, "it is not running")
        number, me = next(self._ids), os.getpid()
        request = Fork(id=number, marker=marker, parent_pid=me, cwd=config.cwd, env=config.env)
        self._answers[number] = answer = asyncio.get_running_loop().create_future()
        outputs = (descriptors.child_stdout, descriptors.child_stderr)
        handed_on = [*descriptors.child_numbers, *outputs]
        try:
            socket.send_fds(self._connection, [msgspec.msgpack.encode(request)], handed_on)
        except OSError as fault:
            del self._answers[number]
            raise TemplateLost(self.name, f"it could not be asked: {fault}") from fault
        try:
            pid = await asyncio.shield(answer)
        except asyncio.CancelledError:
            answer.add_done_callback(self._kill_unwanted)
            raise
        return Spawned(pid, lambda: self._collect(pid))

    def stop(self) -> None:
        """End the template; its children live on. Safe at any time, any number of times."""
        self._end("it was stopped")

    def _on_readable(self) -> None:
        try:
            data = self._connection.recv(_ANSWER_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._end("its process ended")
            return
        forked = msgspec.msgpack.decode(data, type=Forked)
        answer = self._answers.pop(forked.id)
        if forked.pid:
            self._children.add(forked.pid)
        if answer.done():
            return  # `load` was cancelled
        if forked.error:
            answer.set_exception(TemplateLost(self.name, forked.error))
        else:
            answer.set_result(forked.pid)

    def _end(self, reason: str) -> None:
        if self._connection.fileno() < 0:
            return
        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop().remove_reader(self._connection)
        self._connection.close()
        self._kill()
        for waiting in self._answers.values():
            if not waiting.done():
                waiting.set_exception(TemplateLost(self.name, reason))
        self._answers.clear()
        if self._exited is not None and not self._exited.done():
            self._exited.set_result(reason)

    def _kill(self) -> None:
        """Kill the template, and forks of it whose pid was not reported.

        Such a fork holds descriptors of a session that is started in another way. Until it has
        received Hello, a fork belongs to the template's POSIX session.
        """
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            kill_members(self.pid, self._children)
            os.waitpid(self.pid, 0)

    def _collect(self, pid: int) -> int:
        """The return code of an adopted child, as `subprocess` counts them."""
        self._children.discard(pid)
        try:
            _, status = os.waitpid(pid, 0)
        except ChildProcessError:  # another wait in this process has collected it
            return -signal.SIGKILL
        return os.waitstatus_to_exitcode(status)

    def _kill_unwanted(self, answer: asyncio.Future[int]) -> None:
        """Kill a child whose caller was cancelled while the child was forked."""
        if answer.cancelled() or answer.exception() is not None:
            return
        with contextlib.suppress(OSError):
            os.kill(answer.result(), signal.SIGKILL)
        self._collect(answer.result())


def _be_template(theirs: socket.socket, parent_pid: int) -> NoReturn:
    """Turn a fork of the caller into a template, without anything that was the caller's."""
    try:
        os.setsid()
        for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
            signal.signal(signum, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        template = importlib.import_module("capsule_tasks.child.boot.template")
        template.detach_from_caller(theirs.fileno())
        template.main(theirs.fileno(), parent_pid)
    finally:
        os._exit(70)


class TemplateSpawner:
    """Keeps one template loaded. Without it sessions start slower, but they start."""

    def __init__(self, profile: Profile, template: Template | None = None) -> None:
        """`template` is the first one, if it exists already; later templates are fresh."""
        self._profile = profile
        self._first = template
        self._cold = ColdSpawner()
        self._template: Template | None = None
        self._reloader: asyncio.Task[None] | None = None
        self._first_tried = asyncio.Event()
        """Set when the first template is loaded, or failed to, or there will be none."""
        self._is_stopped = False
        self.forks = 0
        self.cold_starts = 0
        self.templates_lost = 0
        self.last_error = ""

    @property
    def template_pid(self) -> int | None:
        template = self._template
        return template.pid if template is not None and template.is_usable else None

    async def start(self) -> None:
        """Load the first template; if that fails, children start cold and the load is retried."""
        if self._profile.start == "cold" or not IS_LINUX or self._is_stopped:
            return  # without a subreaper only the template could collect its children
        if self._reloader is None:
            self._reloader = asyncio.get_running_loop().create_task(self._reload_template())
            self._reloader.add_done_callback(lambda _: self._first_tried.set())
        await self._first_tried.wait()

    async def spawn(
        self, descriptors: ChildDescriptors, config: SessionConfig, marker: str
    ) -> Spawned:
        template = self._template
        if template is not None and template.is_usable:
            try:
                spawned = await template.spawn(descriptors, config, marker)
            except TemplateLost as error:
                log.warning("%s; starting cold", error)
            else:
                self.forks += 1
                return spawned
        self.cold_starts += 1
        return await self._cold.spawn(descriptors, config, marker)

    async def stop(self) -> None:
        self._is_stopped = True
        if self._reloader is not None:
            self._reloader.cancel()
            await asyncio.wait({self._reloader})
        for template in (self._template, self._first):
            if template is not None:
                template.stop()

    async def _reload_template(self) -> None:
        """Load a template, wait for its end, load the next; slower after each failure."""
        delay_s = _MIN_RETRY_S
        while True:
            try:
                self._template = template = await self._load()
            except (TemplateLost, OSError) as error:
                self.last_error = why = reason_of(error)
                log.warning("no template: %s; the next attempt is in %.1f s", why, delay_s)
                self._first_tried.set()
            else:
                delay_s = _MIN_RETRY_S
                self._first_tried.set()
                self.last_error = await template.ended()
                self.templates_lost += 1
                log.warning("the template of %s ended: %s", template.name, self.last_error)
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, _MAX_RETRY_S)

    async def _load(self) -> Template:
        session, imports = self._profile.session, self._profile.imports
        template, self._first = self._first, None
        template = template or Template.fresh(imports, python=session.python, env=session.env)
        await template.load(self._profile.template_timeout_s)
        return template
