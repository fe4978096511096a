"""Child processes that a task message has cost, counted over all workers."""

from __future__ import annotations

from capsule_tasks.settings import RetrySettings
from capsule_tasks.storage.keys import losses_key
from capsule_tasks.storage.operations import Operation, call_script
from capsule_tasks.storage.scripts import script

_TTL_MS = 7 * 86_400_000
_TWICE = RetrySettings(attempts=2)


@script("executions/losses_add")
def losses_add(losses: str, *, ttl_ms: int, loss: str) -> None: ...


@script("executions/losses_drop")
def losses_drop(losses: str, *, loss: str) -> None: ...


class LossCore:
    """The losses of one task message; each has an id, and so counts once."""

    def __init__(self, execution_id: str, attempt: str, prefix: str = "capsule") -> None:
        self._key = losses_key(execution_id, attempt, prefix)

    def add(self, loss: str) -> Operation[int]:
        """Count a loss; the number of losses so far."""
        reply = yield from call_script(
            losses_add.call(self._key, ttl_ms=_TTL_MS, loss=loss), _TWICE
        )
        return int(reply[1])

    def drop(self, loss: str) -> Operation[None]:
        """Take a loss back: the child ended in order."""
        yield from call_script(losses_drop.call(self._key, loss=loss), _TWICE)
