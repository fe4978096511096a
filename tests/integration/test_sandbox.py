"""Hostile code in a sandbox: it reaches nothing, in a session here or sent to a worker."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from capsule_tasks.errors import InvalidSetting, Unconfined
from capsule_tasks.sessions import Session, SessionPool
from capsule_tasks.settings import (
    Profile,
    SandboxSettings,
    SessionConfig,
    scrubbed_environment,
)
from capsule_tasks.testing.servers import PrivateServer
from tests.sandboxes import (
    PACKAGES,
    Sandbox,
    StartSandbox,
    code_pool,
    config,
    environment,
    owner_of,
    refused,
)
from tests.sessions import HANG_S, eventually


async def test_the_restrictions_that_were_applied_are_reported() -> None:
    applied = {"reads", "writes", "network", "signals", "capabilities", "no_new_privs"}
    async with Session(config()) as session:
        assert applied <= set(session.info.isolation)


OPEN = """
import os
found = set()
for number in range(1024):
    try:
        status = os.fstat(number)
    except OSError:
        continue
    found.add((status.st_dev, status.st_ino))
found
"""


async def test_nothing_that_the_parent_has_open_is_inherited(tmp_path: Path) -> None:
    """Neither from a cold start nor from a template, even without close-on-exec."""
    with contextlib.ExitStack() as held, socket.socket() as sock:
        ours = [os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR), *os.pipe(), sock.fileno()]
        for descriptor in ours:
            os.set_inheritable(descriptor, True)
        for descriptor in ours[:-1]:
            held.callback(os.close, descriptor)
        known = {(status.st_dev, status.st_ino) for status in map(os.fstat, ours)}
        async with asyncio.timeout(HANG_S), code_pool(min_idle=1) as pool:
            async with pool.borrow("code") as session:
                assert not known & (await session.run(OPEN)).value
            assert pool.spawner("code").forks
        async with asyncio.timeout(HANG_S), Session(config()) as session:
            assert not known & (await session.run(OPEN)).value


@pytest.mark.parametrize("path", ["/etc/shadow", "/etc/passwd", "/root/.bashrc", "/proc/1/environ"])
async def test_system_files_cannot_be_read(sandbox: Sandbox, path: str) -> None:
    await refused(sandbox, f"open({path!r}).read()")


async def test_the_parents_environment_and_memory_cannot_be_read(sandbox: Sandbox) -> None:
    for name in ("environ", "maps", "mem", "cmdline"):
        await refused(sandbox, f"open('/proc/{owner_of(sandbox)}/{name}').read()")


async def test_a_projects_secrets_cannot_be_read(sandbox: Sandbox, tmp_path: Path) -> None:
    token = tmp_path / "serviceaccount" / "token"
    token.parent.mkdir()
    for path in (tmp_path / "celeryconfig.py", tmp_path / ".env", token):
        path.write_text("secret")
        path.chmod(0o644)
        await refused(sandbox, f"open({str(path)!r}).read()")
    await refused(sandbox, f"__import__('os').listdir({str(tmp_path)!r})")
    await refused(sandbox, f"open({str(Path('pyproject.toml').resolve())!r}).read()")


async def test_another_sessions_directory_is_out_of_reach(sandbox: Sandbox) -> None:
    async with Session(config()) as other:
        await other.run("open('mine', 'w').write('secret')")
        directory = (await other.run("import os; os.getcwd()")).value
        await refused(sandbox, f"open('{directory}/mine').read()")
        await refused(sandbox, f"__import__('os').listdir({directory!r})")
        await refused(sandbox, f"open('{directory}/theirs', 'w')")


async def test_writes_stay_in_its_own_directory(sandbox: Sandbox, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    for path in (tmp_path / "x", Path("/tmp/capsule-escape"), Path("/dev/shm/x")):
        await refused(sandbox, f"open({str(path)!r}, 'w')")
        assert not path.exists()
    await refused(sandbox, f"__import__('os').symlink('/etc', {str(tmp_path / 'link')!r})")
    await refused(sandbox, "import os; os.symlink('/etc/shadow', 'link'); open('link').read()")


async def test_its_own_directory_is_private_empty_and_gone_afterwards() -> None:
    async with Session(config()) as session:
        source = (
            "import os, tempfile\n"
            "found = os.listdir('.')\n"
            "open('kept', 'w').write('x')\n"
            "os.makedirs('a/b'); os.chmod('a/b', 0); os.chmod('a', 0)\n"
            "os.getcwd(), found, os.path.expanduser('~'), tempfile.gettempdir()"
        )
        own, found, home, temporary = (await session.run(source)).value
        assert (found, home, temporary) == ([], own, own)
        assert Path(own).stat().st_mode & 0o777 == 0o700
    await eventually(lambda: not Path(own).exists())


async def test_the_environment_holds_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_PASSWORD", "hunter2")
    async with (
        asyncio.timeout(HANG_S),
        code_pool(min_idle=1) as pool,
        pool.borrow("code") as session,
    ):
        source = "import os; dict(os.environ), open('/proc/self/environ').read()"
        environment, shown = (await session.run(source)).value
    assert "DATABASE_PASSWORD" not in environment
    assert "hunter2" not in shown


async def test_a_sandbox_without_an_environment_of_its_own_does_not_get_the_parents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DATABASE_PASSWORD", "hunter2")
    bare = SessionConfig(child=config().child)
    assert bare.env == scrubbed_environment()
    if PACKAGES:
        return  # this user's child needs to be told where the packages are
    source = "import os; dict(os.environ), open('/proc/self/environ').read()"
    pool = SessionPool({"app": Profile(session=bare)})
    async with asyncio.timeout(HANG_S), Session(bare) as cold, pool, pool.borrow() as forked:
        for session in (cold, forked):
            environment, shown = (await session.run(source)).value
            assert "DATABASE_PASSWORD" not in environment
            assert "hunter2" not in shown


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateServer]:
    with PrivateServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


async def test_redis_and_other_servers_cannot_be_reached(
    sandbox: Sandbox, redis: PrivateServer
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        for port in (redis.port, other.getsockname()[1]):
            await refused(
                sandbox, f"__import__('socket').create_connection(('127.0.0.1', {port}), 2)"
            )
        other.settimeout(0)
        with pytest.raises(BlockingIOError):
            other.accept()


async def test_no_packet_leaves(sandbox: Sandbox) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        receiver.bind(("127.0.0.1", 0))
        receiver.setblocking(False)
        await refused(
            sandbox,
            "import socket\n"
            "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
            f"s.sendto(b'x', ('127.0.0.1', {receiver.getsockname()[1]}))",
        )
        with pytest.raises(BlockingIOError):
            receiver.recv(1)


@pytest.mark.parametrize("kind", ["path", "abstract"])
async def test_unix_sockets_cannot_be_reached(sandbox: Sandbox, tmp_path: Path, kind: str) -> None:
    address = str(tmp_path / "redis.sock") if kind == "path" else f"\0capsule-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen()
        await refused(sandbox, f"import socket; socket.socket(socket.AF_UNIX).connect({address!r})")


async def test_a_datagram_cannot_leave_through_a_pair_of_its_own(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    address = str(tmp_path / "log")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(address)
        server.setblocking(False)
        for kind in ("SOCK_DGRAM", "SOCK_RAW", "SOCK_DGRAM | socket.SOCK_CLOEXEC"):
            source = (
                f"socket.socketpair(socket.AF_UNIX, socket.{kind})[0].sendto(b'x', {address!r})"
            )
            await refused(sandbox, f"import socket; {source}")
        stream = f"import socket; socket.socketpair()[0].sendto(b'x', {address!r})"
        await refused(sandbox, stream, "OSError")
        with pytest.raises(BlockingIOError):
            server.recv(1)


async def test_an_open_network_does_not_open_the_sockets_of_this_machine(
    start_sandbox: StartSandbox, tmp_path: Path
) -> None:
    address = str(tmp_path / "docker.sock")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen()
        async with start_sandbox(network="open") as session:
            connect = f"socket.socket(socket.AF_UNIX).connect({address!r})"
            await refused(session, f"import socket; {connect}")
            await refused(session, "import socket; socket.socketpair(type=socket.SOCK_DGRAM)")
            source = "import socket; socket.getaddrinfo('127.0.0.1', 80)[0][4]"
            assert (await session.run(source)).value == ("127.0.0.1", 80)


async def test_modes_times_and_attributes_of_foreign_files_do_not_change(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    mine = tmp_path / "mine"
    mine.write_text("x")
    mine.chmod(0o600)
    before = mine.stat()
    readable = json.__file__
    library = Path(readable).stat()
    await sandbox.run(
        f"import os\nos.chmod({str(mine)!r}, 0o666)\nos.utime({str(mine)!r}, (1, 1))\n"
        f"with open({readable!r}) as file:\n"
        "    os.fchmod(file.fileno(), 0o666)\n"
        "    os.utime(file.fileno(), (1, 1))\n"
    )
    await refused(sandbox, f"import os; os.setxattr({str(mine)!r}, 'user.x', b'1')")
    await refused(sandbox, f"import os; os.chown({str(mine)!r}, -1, {os.getgid()})")
    set_flags = "fcntl.ioctl(file, 0x40086602, bytes(8))"
    await refused(sandbox, f"import fcntl\nwith open({readable!r}) as file: {set_flags}")
    for path, was in ((mine, before), (Path(readable), library)):
        now = path.stat()
        assert (now.st_mode, now.st_mtime, now.st_ctime) == (
            was.st_mode,
            was.st_mtime,
            was.st_ctime,
        )


async def test_copying_a_file_works_although_its_mode_stays(sandbox: Sandbox) -> None:
    source = (
        "import os, shutil, tarfile\n"
        "open('a', 'w').write('x')\nshutil.copy2('a', 'b')\nos.mkdir('d')\n"
        "with tarfile.open('t', 'w') as archive: archive.add('a')\n"
        "with tarfile.open('t') as archive: archive.extractall('d')\n"
        "shutil.copytree('d', 'e')\n"
        "open('b').read() + open('e/a').read()"
    )
    assert (await sandbox.run(source)).value == "xx"


async def test_limits_and_priorities_of_the_parent_cannot_be_changed(sandbox: Sandbox) -> None:
    pid = owner_of(sandbox)
    for call in (
        f"import resource as r; r.prlimit({pid}, r.RLIMIT_NOFILE, r.getrlimit(r.RLIMIT_NOFILE))",
        f"import os; os.setpriority(os.PRIO_PROCESS, {pid}, os.getpriority(os.PRIO_PROCESS, 0))",
        "import os; os.setpriority(os.PRIO_USER, 0, os.getpriority(os.PRIO_PROCESS, 0))",
        f"import os; os.sched_setaffinity({pid}, os.sched_getaffinity(0))",
        f"import os; os.sched_setscheduler({pid}, os.SCHED_OTHER, os.sched_param(0))",
    ):
        await refused(sandbox, call)
    source = "import os, resource as r; r.setrlimit(r.RLIMIT_CORE, (0, 0)); os.nice(1)"
    niceness = min(os.getpriority(os.PRIO_PROCESS, 0) + 1, 19)  # the suite may run under nice 19
    assert (await sandbox.run(source)).value == niceness


@pytest.mark.parametrize(
    "call",
    [
        "memfd_create(b'x', 0)",
        "shmget(0, 4096, 0o1600)",
        "semget(0, 1, 0o1600)",
        "msgget(0, 0o1600)",
        "inotify_init1(0)",
    ],
)
async def test_uncharged_memory_and_file_watches_are_refused(sandbox: Sandbox, call: str) -> None:
    source = f"import ctypes; ctypes.CDLL(None, use_errno=True).{call}, ctypes.get_errno()"
    assert (await sandbox.run(source)).value == (-1, errno.EPERM)


async def test_an_open_network_is_open_when_asked_for(start_sandbox: StartSandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        async with start_sandbox(network="open") as session:
            await session.run(f"import socket; socket.create_connection(('127.0.0.1', {port})); 0")
        if isinstance(session, Session):
            assert "network" not in session.info.isolation


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, 0])
async def test_the_parent_and_siblings_cannot_be_signalled(sandbox: Sandbox, signum: int) -> None:
    async with Session(config()) as sibling:
        for pid in (owner_of(sandbox), sibling.info.pid, 1):
            source = f"__import__('os').kill({pid}, {int(signum)})"
            await refused(sandbox, source, "PermissionError", "ProcessLookupError")
        assert (await sibling.run("'alive'")).value == "alive"


async def test_ptrace_and_the_memory_of_others_are_refused(sandbox: Sandbox) -> None:
    source = (
        "import ctypes, os\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        f"answers = [libc.ptrace(16, {owner_of(sandbox)}, 0, 0), libc.unshare(0x10000000),\n"
        "           libc.mount(b'none', b'.', b'tmpfs', 0, 0), libc.setns(0, 0)]\n"
        "answers, os.strerror(ctypes.get_errno())"
    )
    answers, reason = (await sandbox.run(source)).value
    assert answers == [-1, -1, -1, -1]
    assert reason == "Operation not permitted"


async def test_io_uring_cannot_bypass_a_refusal(sandbox: Sandbox) -> None:
    source = (
        "import ctypes\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "libc.syscall(425, 8, ctypes.create_string_buffer(256)), ctypes.get_errno()"
    )
    assert (await sandbox.run(source)).value == (-1, 1)


async def test_no_privilege_is_left(sandbox: Sandbox) -> None:
    source = (
        "status = open('/proc/self/status').read().split()\n"
        "[int(status[status.index(name) + 1], 16) for name in ('CapPrm:', 'CapEff:')]"
    )
    assert (await sandbox.run(source)).value == [0, 0]
    await refused(sandbox, "__import__('os').chroot('.')")


async def test_a_sandbox_that_cannot_be_had_does_not_start(tmp_path: Path) -> None:
    crippled = _python_without_landlock(tmp_path)
    with pytest.raises(Unconfined, match="cannot confine reads, writes, signals"):
        await Session(_with_python(config(), crippled)).start()
    async with Session(_with_python(config(isolation="best_effort"), crippled)) as session:
        assert "reads" not in session.info.isolation
        assert "network" in session.info.isolation


def _with_python(config: SessionConfig, python: Path) -> SessionConfig:
    path = ":".join((str(python.parent), *PACKAGES, str(Path.cwd())))
    return SessionConfig(child=config.child, env=environment() | {"PYTHONPATH": path})


def _python_without_landlock(directory: Path) -> Path:
    """A start-up hook that hides Landlock and the signal filter, as an old kernel would."""
    (directory / "sitecustomize.py").write_text(
        "from capsule_tasks.system.sandbox import landlock, seccomp\n"
        "landlock.abi = lambda: 0\n"
        "confine = seccomp.confine\n"
        "seccomp.confine = lambda **asked: confine(**asked | {'signals': False})\n"
    )
    return directory / "python"


@pytest.mark.skipif(os.geteuid() != 0, reason="is itself the run of these files as another user")
def test_all_of_this_holds_for_a_user_who_is_not_root() -> None:
    system_python = Path("/usr/bin/python3.11")
    python = str(system_python if sys.version_info[:2] == (3, 11) else sys.executable)
    (packages,) = {path for path in sys.path if path.endswith("site-packages")}
    project = str(Path.cwd())
    base = Path(tempfile.mkdtemp())
    base.chmod(0o777)
    user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    if subprocess.run([*user, python, "-c", ""], capture_output=True, check=False).returncode:
        pytest.skip(f"{python} is out of reach for other users of this machine")
    files = sorted(map(str, Path(__file__).parent.glob("test_sandbox*.py")))
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--basetemp={base}/own"]
    done = subprocess.run(
        [*user, python, "-m", "pytest", *options, *files],
        env={
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": f"{packages}:{project}",
            "CAPSULE_TEST_PACKAGES": f"{packages}:{project}/capsule_tasks",
            "HOME": "/tmp",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    shutil.rmtree(base)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(InvalidSetting, match=r"SandboxSettings\.network = 'some'"):
        SandboxSettings(network="some")  # type: ignore[arg-type]
