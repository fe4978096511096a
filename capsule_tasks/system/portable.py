"""Whether this system has what only Linux has: prctl, pidfds, `/proc`.

Without it sessions start cold, a thread waits for the exit of a child, and a child learns of its
parent's end by the end of its control channel. `CAPSULE_PORTABLE=1` has Linux do without, too.
"""

from __future__ import annotations

import contextlib
import sys

from capsule_tasks.settings import is_portable_wanted

IS_LINUX = sys.platform == "linux" and not is_portable_wanted()

_PS_TIMEOUT_S = 10.0

PROC = "/proc" if IS_LINUX else "/there/is/no/proc"


def parents() -> dict[int, int]:
    """The parent of every process, as `ps` lists them; nothing where there is no `ps`."""
    import subprocess  # here, as a child that starts on Linux should not pay for it

    found: dict[int, int] = {}
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        listing = subprocess.run(
            ["ps", "-A", "-o", "pid=,ppid="],  # noqa: S607 - its place differs
            capture_output=True,
            check=True,
            timeout=_PS_TIMEOUT_S,
        )
        for line in listing.stdout.splitlines():
            pid, parent = line.split()
            found[int(pid)] = int(parent)
    return found
