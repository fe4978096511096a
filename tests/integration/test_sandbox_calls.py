"""Hostile code in a sandbox session: system calls whose effect would reach beyond the sandbox."""

from __future__ import annotations

import asyncio
import errno
import platform
from pathlib import Path

import pytest

from capsule_tasks.protocol.messages import Output
from capsule_tasks.sessions import Session
from capsule_tasks.settings import SessionConfig
from tests.sandboxes import PACKAGES, StartSandbox, config, environment, refused
from tests.sessions import HANG_S, until_exited

_SYNC, _SYNCFS, _VMSPLICE, _CLONE = {
    "x86_64": (162, 306, 278, 56),
    "aarch64": (81, 267, 75, 220),
}[platform.machine()]
_AIO, _MMAP, _SECCOMP = {
    "x86_64": ((206, 207, 208, 209, 210, 333), 9, 317),
    "aarch64": ((0, 1, 2, 3, 4, 292), 222, 277),
}[platform.machine()]
_LANDLOCK_CREATE_RULESET = 444
_PRELUDE = """
import ctypes, fcntl, json, os, signal, socket
libc = ctypes.CDLL(None, use_errno=True)
def failed(answer):
    return ctypes.get_errno() if answer == -1 else 0
"""


async def test_a_sandbox_cannot_block_others_that_open_a_file(tmp_path: Path) -> None:
    """A lease on a readable file makes every `open` of it wait for the holder of the lease."""
    library = tmp_path / "library.py"
    library.write_text("x = 1")
    readable = (*PACKAGES, str(tmp_path))
    async with asyncio.timeout(HANG_S), Session(config(readable=readable)) as session:
        await session.run(f"{_PRELUDE}file = open({str(library)!r}); signal.signal(29, 1)")
        for command, argument in (
            ("fcntl.F_SETLEASE", "fcntl.F_WRLCK"),
            ("fcntl.F_SETLEASE", "fcntl.F_RDLCK"),
        ):
            message = await refused(session, f"fcntl.fcntl(file, {command}, {argument})")
            assert message == f"[Errno {errno.EPERM}] Operation not permitted"
        watch = "fcntl.fcntl(os.open('/usr/lib', os.O_RDONLY), fcntl.F_NOTIFY, fcntl.DN_ACCESS)"
        await refused(session, watch)
        await asyncio.to_thread(library.write_text, "x = 2")


@pytest.mark.parametrize(
    "call",
    [
        "libc.fcntl(r, fcntl.F_SETPIPE_SZ, 1 << 20)",
        "libc.fcntl(r, fcntl.F_SETOWN, os.getppid())",
        "libc.fcntl(r, 15, bytes(8))",
        "libc.fcntl(r, 10, signal.SIGUSR1)",
        "libc.fcntl(r, 1036, bytes(8))",
        "libc.ioctl(pair[0].fileno(), 0x8901, ctypes.byref(ctypes.c_int(os.getppid())))",
        "libc.ioctl(pair[0].fileno(), 0x8902, ctypes.byref(ctypes.c_int(os.getppid())))",
        f"libc.syscall({_SYNC})",
        f"libc.syscall({_SYNCFS}, r)",
        f"libc.syscall({_VMSPLICE}, w, None, 0, 0)",
        f"libc.syscall({_CLONE}, 0x8000 | signal.SIGCHLD, 0, 0, 0, 0) or os._exit(0)",
        "libc.prctl(1, 0, 0, 0, 0)",
        "libc.prctl(36, 0, 0, 0, 0)",
    ],
    ids=[
        "F_SETPIPE_SZ",
        "F_SETOWN",
        "F_SETOWN_EX",
        "F_SETSIG",
        "F_SET_RW_HINT",
        "FIOSETOWN",
        "SIOCSPGRP",
        "sync",
        "syncfs",
        "vmsplice",
        "CLONE_PARENT",
        "PR_SET_PDEATHSIG",
        "PR_SET_CHILD_SUBREAPER",
    ],
)
async def test_calls_that_reach_beyond_the_sandbox_are_refused(
    start_sandbox: StartSandbox, call: str
) -> None:
    source = f"{_PRELUDE}r, w = os.pipe()\npair = socket.socketpair()\nfailed({call})"
    async with asyncio.timeout(HANG_S), start_sandbox() as session:
        assert (await session.run(source)).value == errno.EPERM


async def test_resources_that_are_counted_machine_wide_are_refused(
    start_sandbox: StartSandbox,
) -> None:
    """AIO contexts, compiled filters, huge pages; and memory that is charged to no process.

    The arguments are such that none of these calls would take anything.
    """
    source = (
        f"{_PRELUDE}"
        "import errno, mmap\n"
        "def code(call, *arguments):\n"
        "    ctypes.set_errno(0)\n"
        "    answer = call(*map(ctypes.c_long, arguments))\n"
        "    return errno.errorcode.get(failed(answer), answer)\n"
        "def attached(option):\n"
        "    try: socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, option, bytes(16))\n"
        "    except OSError as error: return errno.errorcode[error.errno]\n"
        f"answers = {{number: code(libc.syscall, number, *[0] * 6) for number in {_AIO}}}\n"
        "answers |= {\n"
        f"    'seccomp': code(libc.syscall, {_SECCOMP}, 99, 0, 0),\n"
        "    'PR_SET_SECCOMP': code(libc.prctl, 22, 99, 0, 0, 0),\n"
        f"    'landlock': code(libc.syscall, {_LANDLOCK_CREATE_RULESET}, 0, 0, 1),\n"
        "    'SO_ATTACH_FILTER': attached(26),\n"
        "    'SO_ATTACH_REUSEPORT_CBPF': attached(51),\n"
        f"    'MAP_HUGETLB': code(libc.syscall, {_MMAP}, 0, 0, 3, 0x40022, -1, 0),\n"
        f"    'a thread with its own files': code(libc.syscall, {_CLONE}, 0x10000, 0, 0, 0, 0),\n"
        "}\n"
        "answers"
    )
    async with asyncio.timeout(HANG_S), start_sandbox() as session:
        answers = (await session.run(source)).value
    assert answers == dict.fromkeys(answers, "EPERM")


async def test_copies_and_answers_do_without_sendfile(start_sandbox: StartSandbox) -> None:
    """Into a pipe or a socket it pins a page, which may be a huge one, for each byte it sends."""
    source = (
        f"{_PRELUDE}"
        "import asyncio, errno, shutil\n"
        "with open('own', 'wb') as own: own.write(bytes(range(256)) * 512)\n"
        "file, pair = open('own', 'rb'), socket.socketpair()\n"
        "def code(out):\n"
        "    try: return os.sendfile(out, file.fileno(), 0, 1)\n"
        "    except OSError as error: return errno.errorcode[error.errno]\n"
        "refused = [code(os.pipe()[1]), code(pair[0].fileno())]\n"
        "shutil.copyfile('own', 'copy')\n"
        "sent = pair[0].sendfile(file, 0, 1000), len(pair[1].recv(2000))\n"
        "async def serve():\n"
        "    pair[0].setblocking(False)\n"
        "    _, writer = await asyncio.open_connection(sock=pair[0])\n"
        "    await asyncio.get_running_loop().sendfile(writer.transport, file, 0, 1000)\n"
        "    return len(pair[1].recv(2000))\n"
        "served = asyncio.run(serve())\n"
        "refused, open('copy', 'rb').read() == open('own', 'rb').read(), sent, served"
    )
    async with asyncio.timeout(HANG_S), start_sandbox() as session:
        answer = (await session.run(source)).value
    assert answer == (["ENOSYS", "ENOSYS"], True, (1000, 1000), 1000)


async def test_locks_and_other_operations_on_descriptors_stay_possible(
    start_sandbox: StartSandbox,
) -> None:
    source = (
        f"{_PRELUDE}import sqlite3, shutil, sys\n"
        "with open(json.__file__) as shared:\n"
        "    fcntl.flock(shared, fcntl.LOCK_SH | fcntl.LOCK_NB)\n"
        "    fcntl.lockf(shared, fcntl.LOCK_SH | fcntl.LOCK_NB)\n"
        "    os.posix_fadvise(shared.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)\n"
        "with open('own', 'w') as own:\n"
        "    fcntl.lockf(own, fcntl.LOCK_EX)\n"
        "    own.write('x')\n"
        "shutil.copyfile('own', 'copy')\n"
        "database = sqlite3.connect('db')\n"
        "with database: database.execute('create table t (n)')\n"
        "with database: database.execute('insert into t values (41)')\n"
        "r, w = os.pipe()\n"
        "os.set_blocking(r, False); os.set_inheritable(r, True)\n"
        "fcntl.fcntl(r, fcntl.F_GETPIPE_SZ), os.isatty(r), os.dup(w) > 0\n"
        "open('copy').read(), database.execute('select n + 1 from t').fetchone()"
    )
    async with asyncio.timeout(HANG_S), start_sandbox() as session:
        assert (await session.run(source)).value == ("x", (42,))


async def test_buffers_of_sockets_keep_their_default_size(start_sandbox: StartSandbox) -> None:
    """The kernel charges them to no process, so code must not decide how much many pairs hold."""
    source = (
        f"{_PRELUDE}"
        "def held(pair):\n"
        "    for end in pair:\n"
        "        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF, 32, 33):\n"
        "            end.setsockopt(socket.SOL_SOCKET, option, 1 << 26)\n"
        "    pair[0].setblocking(False)\n"
        "    size = 0\n"
        "    try:\n"
        "        while True: size += pair[0].send(bytes(65536))\n"
        "    except BlockingIOError: return size\n"
        "pairs = [socket.socketpair() for _ in range(8)]\n"
        "default = pairs[0][0].getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)\n"
        "default, [held(pair) for pair in pairs]"
    )
    async with asyncio.timeout(HANG_S), start_sandbox() as session:
        default, held = (await session.run(source)).value
    assert 0 < min(held) <= max(held) <= 2 * default


async def test_an_orphan_that_hides_dies_with_a_child_that_dies_by_itself(
    start_sandbox: StartSandbox,
) -> None:
    """No marker in its environment, no parent in the family, and a POSIX session of its own."""
    source = (
        "import os, sys\n"
        "reading, writing = os.pipe()\n"
        "os.set_inheritable(writing, True)\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        tell = f'os.write({writing}, b\"%d\" % os.getpid())'\n"
        "        code = f'import os, time; {tell}; time.sleep(60)'\n"
        "        os.execve(sys.executable, [sys.executable, '-S', '-c', code], {})\n"
        "    os._exit(0)\n"
        "print(int(os.read(reading, 20)), flush=True)\n"
        "os._exit(3)"
    )
    daemon = 0
    async with asyncio.timeout(HANG_S), start_sandbox() as session:
        async for message in session.execute(source):
            if isinstance(message, Output) and message.stream == "stdout":  # not Python's warnings
                daemon = daemon or int(message.data)
        assert daemon
        await until_exited(daemon)


async def test_an_old_landlock_does_not_let_readable_files_be_cut(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "from capsule_tasks.system.sandbox import landlock\nlandlock.abi = lambda: 2\n"
    )
    library = tmp_path / "library.py"
    library.write_text("x = 1")
    path = ":".join((str(tmp_path), *PACKAGES, str(Path.cwd())))
    old = SessionConfig(
        child=config(readable=(*PACKAGES, str(tmp_path))).child,
        env=environment() | {"PYTHONPATH": path},
    )
    async with asyncio.timeout(HANG_S), Session(old) as session:
        await session.run(f"import os; library = {str(library)!r}; open('own', 'w').write('xx')")
        for source in (
            "os.truncate(library, 0)",
            "os.open(library, os.O_RDONLY | os.O_TRUNC)",
            "os.open(library, os.O_ACCMODE | os.O_TRUNC)",
            "os.open(library, os.O_WRONLY | os.O_TRUNC)",
        ):
            await refused(session, source)
        source = "with open('own', 'r+') as file: file.truncate(1)\nos.stat('own').st_size"
        assert (await session.run(source)).value == 1
    assert library.read_text() == "x = 1"
    assert "truncation" in session.info.isolation
