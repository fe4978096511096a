"""Whether the servers answer that the end of a task is told to: its broker, and its results'."""

from __future__ import annotations

from typing import Any

from capsule_tasks.client.redis_location import redis_of_backend, redis_of_broker
from capsule_tasks.storage.connections.blocking import is_reachable

_TIMEOUT_S = 1.0


def servers_reachable(app: Any) -> bool:
    """Asks each for so long at most; one that is no plain Redis counts as if it answered."""
    urls = {redis_of_broker(app), redis_of_backend(app)}
    return all(is_reachable(url, _TIMEOUT_S) for url in urls if url is not None)
