"""The sender of a command, as a worker's log names it."""

from __future__ import annotations

import getpass
import os
import socket


def requested_by() -> str:
    """The user, host and process that this call is made in."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}, process {os.getpid()}"
