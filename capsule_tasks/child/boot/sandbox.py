"""Confining a child before it runs any foreign code. A child that cannot be confined exits.

The order matters. Privileges are dropped first, as root ignores most limits. Then Landlock confines
files, TCP and signals. The system call filter comes last, and refuses the calls by which code could
evade Landlock. Nothing of this can be undone from inside, and every process that the child starts
inherits it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import site
import sys
import sysconfig

import capsule_tasks
from capsule_tasks.child.boot.limits import lower
from capsule_tasks.errors import Unconfined
from capsule_tasks.settings import SandboxSettings
from capsule_tasks.system.prctl import drop_capabilities
from capsule_tasks.system.sandbox import landlock, seccomp

REQUIRED = ("reads", "writes", "network", "signals")
"""The promises of a sandbox. With `required` it does not start without all of them."""

_SYSTEM = (
    "/lib",
    "/lib32",
    "/lib64",
    "/usr/lib",
    "/usr/lib32",
    "/usr/lib64",
    "/usr/local/lib",
    "/usr/share/zoneinfo",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/dev/urandom",
    "/dev/random",
    "/dev/zero",
    "/proc/cpuinfo",
    "/proc/meminfo",
    "/sys/devices/system/cpu",
)
_QUEUED_SIGNALS = 1024
"""Pending signals and timers of all processes of this user: a sandbox gets none beyond it."""


def apply(settings: SandboxSettings) -> tuple[str, ...]:
    """Confine this process to its working directory and the files of Python; what was applied.

    Unconfined if a promise cannot be kept and `isolation` is `required`. Call it while there is
    one thread: other threads would not be confined.
    """
    own = os.getcwd()
    abi = landlock.abi()  # read here: the filter refuses this call
    os.environ.update(HOME=own, TMPDIR=own)
    lower(resource.RLIMIT_SIGPENDING, _QUEUED_SIGNALS)
    readable = (*needed_paths(), "/proc/self", *settings.readable)
    applied: list[str] = []
    if drop_capabilities():
        applied.append("capabilities")
    is_open = settings.network == "open"
    with contextlib.suppress(OSError):  # the kernel lacks or refuses it: see `missing`
        applied += landlock.restrict(readable, (own, "/dev/null"), network=is_open)
    signals, truncation = "signals" not in applied, "truncation" not in applied
    with contextlib.suppress(OSError):
        applied += seccomp.confine(network=is_open, signals=signals, truncation=truncation)
    promised = [name for name in REQUIRED if name != "network" or not is_open]
    missing = [name for name in promised if name not in applied]
    if missing and settings.isolation == "required":
        raise Unconfined(
            f"this machine cannot confine {', '.join(missing)} (Landlock ABI {abi}, "
            f"applied: {', '.join(applied) or 'nothing'}); isolation='best_effort' goes on without"
        )
    return tuple(dict.fromkeys(applied))


@functools.cache
def needed_paths() -> tuple[str, ...]:
    """Files of the system and of Python that Python needs, without paths below other paths.

    Finding them takes longer than confining a child, so a template does it before it forks.
    """
    paths = {os.path.realpath(path) for path in (*_installed_paths(), *_SYSTEM)}
    outermost: list[str] = []
    for path in sorted(path for path in paths if os.path.exists(path)):
        if not outermost or not path.startswith(f"{outermost[-1]}/"):
            outermost.append(path)
    return tuple(outermost)


def _installed_paths() -> tuple[str, ...]:
    """The interpreter, its libraries and this package; never a project's own directory."""
    paths = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    package = os.path.dirname(capsule_tasks.__file__)
    executables = (sys.executable, os.path.realpath(sys.executable))
    found = [*paths, *site.getsitepackages(), package, *executables]
    for prefix in (sys.prefix, sys.base_prefix):
        found += [os.path.join(prefix, name) for name in ("lib", "lib64", "pyvenv.cfg")]
    return tuple(path for path in found if path)
