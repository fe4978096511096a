"""Waiting until replicas have what a connection has written."""

from __future__ import annotations

import logging

from capsule_tasks.settings import ConnectionSettings

log = logging.getLogger("capsule_tasks.storage")


def replica_wait(settings: ConnectionSettings) -> tuple[str, int, int]:
    """The command that waits for the replicas of a connection's writes."""
    return "WAIT", settings.replicas, int(settings.replica_wait_s * 1000)


def check_replicas(reply: int, replicas: int) -> None:
    """Warn of what may be lost with the primary: it counts as stored all the same."""
    if reply < replicas:
        log.warning("Redis: %s replicas have what was written, not %s", reply, replicas)
