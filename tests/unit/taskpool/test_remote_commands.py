"""The remote commands that keep revokes for workers that start later."""

from __future__ import annotations

import functools
import importlib
from types import SimpleNamespace
from typing import Any

import pytest
from celery.worker.control import Panel

from capsule_tasks.taskpool import remote_commands


class Keeper:
    def __init__(self) -> None:
        self.kept: list[tuple[list[str], list[Any]]] = []

    def store(self, ids: Any = (), stamps: Any = ()) -> None:
        self.kept.append((list(ids), list(stamps)))


@pytest.fixture
def keeper() -> Keeper:
    return Keeper()


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Commands as Celery has them, each with what another library has put around it."""

    def wrapped(command: Any) -> Any:
        @functools.wraps(command)
        def around(*_: Any, **__: Any) -> str:
            return "answer"

        return around

    names = ("revoke", "terminate", "revoke_by_stamped_headers")
    others = {name: wrapped(Panel.data[name].__wrapped__) for name in names}
    for name, command in others.items():
        monkeypatch.setitem(Panel.data, name, command)
    importlib.reload(remote_commands)
    return dict(Panel.data)


def test_a_command_that_another_library_has_wrapped_is_kept_too(
    own: dict[str, Any], keeper: Keeper
) -> None:
    state = SimpleNamespace(consumer=SimpleNamespace(capsule_revokes=keeper))
    assert own["revoke"](state, task_id=["a", "b"]) == "answer"
    assert keeper.kept == [(["a", "b"], [])]
    importlib.reload(remote_commands)
    assert Panel.data["revoke"] is own["revoke"]


def test_a_stamp_keeps_its_type(own: dict[str, Any], keeper: Keeper) -> None:
    state = SimpleNamespace(consumer=SimpleNamespace(capsule_revokes=keeper))
    headers = {"tenant": [42, "42"], "rate": 0.5, "dark": True, "none": None}
    own["revoke_by_stamped_headers"](state, headers=headers)
    stamps = [("tenant", 42), ("tenant", "42"), ("rate", 0.5), ("dark", True)]
    assert keeper.kept == [([], stamps)]
