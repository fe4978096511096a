"""Events of the SDK as events of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from capsule_tasks.durable import RunEvent

REPEATED = {"response": {"instructions", "tools"}}
"""What the first and the last events of each reply repeat of the request. It may be long, and those
who watch a run are not always those who may read its instructions."""


class Publisher:
    """Publishes the events of one turn, with the SDK's own names and their data as JSON.

    With each resume the SDK says again which agent is at work; people hear it once.
    """

    def __init__(
        self, publish: Callable[[RunEvent], None] | None, *, hides_first_agent: bool
    ) -> None:
        self._publish = publish
        self._hides_agent = hides_first_agent

    def publish(self, event: Any, agent: str) -> None:
        if event.type == "agent_updated_stream_event":
            if self._hides_agent:
                self._hides_agent = False
                return
            agent, data = event.new_agent.name, None
        elif self._publish is None:
            return
        elif event.type == "raw_response_event":
            data = _plain(event.data, exclude=REPEATED)
        else:
            data = {"name": event.name, "item": _plain(event.item.raw_item)}
        if self._publish is not None:
            self._publish(RunEvent.of(event.type, agent, data))


def _plain(value: Any, exclude: Any = None) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json", exclude=exclude, exclude_unset=True, warnings=False)
    return value
