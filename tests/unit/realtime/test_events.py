"""Events of sessions and of models are told apart by their types, and can be imported."""

from __future__ import annotations

import pytest

from capsule_tasks import realtime
from capsule_tasks.realtime.events import RealtimeEvent
from capsule_tasks.realtime.model import ModelEvent


@pytest.mark.parametrize("base", [RealtimeEvent, ModelEvent])
def test_every_event_has_a_type_of_its_own(base: type[RealtimeEvent | ModelEvent]) -> None:
    kinds = base.__subclasses__()
    assert len({each.type for each in kinds}) == len(kinds) > 10


@pytest.mark.parametrize("kind", RealtimeEvent.__subclasses__())
def test_every_event_of_a_session_is_exported(kind: type[RealtimeEvent]) -> None:
    assert getattr(realtime, kind.__name__) is kind
