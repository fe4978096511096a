"""Whether this system has what only Linux has: prctl, pidfds, eventfds, `/proc`.

Without it sessions start cold, an exit is waited for by a thread, and a child knows of its parent's
end by the end of its control socket. `CAPSULE_PORTABLE=1` has Linux do without, too.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys

from capsule_tasks.settings import is_portable_wanted

IS_LINUX = sys.platform == "linux" and not is_portable_wanted()

_PS_S = 10.0

PROC = "/proc" if IS_LINUX else "/there/is/no/proc"


def parents() -> dict[int, int]:
    """Every process and its parent, as `ps` tells them; nothing where there is no `ps`."""
    found: dict[int, int] = {}
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        told = subprocess.run(
            ["ps", "-A", "-o", "pid=,ppid="],  # noqa: S607 - its place differs
            capture_output=True,
            check=True,
            timeout=_PS_S,
        )
        for line in told.stdout.splitlines():
            pid, parent = line.split()
            found[int(pid)] = int(parent)
    return found
