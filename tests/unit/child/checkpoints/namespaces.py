"""Namespaces that are saved and restored in this process."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from capsule_tasks.child.checkpoints.restoring import Restored, enter_restore
from capsule_tasks.child.checkpoints.saving import Saved, enter_save
from capsule_tasks.child.executors.code import fresh_main


def namespace_of(source: str) -> dict[str, Any]:
    """The namespace of a session that has run this code."""
    module = fresh_main()
    exec(compile(source, "<cell 1>", "exec"), module.__dict__)
    return module.__dict__


def saved(namespace: dict[str, Any]) -> tuple[list[bytes], Saved]:
    """The pieces of a checkpoint, and what is said of it."""
    pieces: list[bytes] = []

    def send(offset: int, data: memoryview) -> None:
        if offset == 0:
            pieces.clear()
        pieces.append(bytes(data))

    return pieces, enter_save(namespace, send, 512, 100_000_000)


class Child:
    """Another child, which restores a checkpoint."""

    def __init__(self, source: str = "") -> None:
        self.module: ModuleType = fresh_main()
        self.run(source)

    def run(self, source: str) -> None:
        exec(compile(source, "<cell 2>", "exec"), self.module.__dict__)

    def value(self, source: str) -> Any:
        return eval(source, self.module.__dict__)

    def restore(self, pieces: list[bytes], mode: str = "merge") -> Restored:
        return enter_restore(list(pieces), mode, self.module)


def moved(source: str) -> Child:
    """A child with the namespace of another one that has run this code; nothing is missing."""
    pieces, about = saved(namespace_of(source))
    assert about.skipped == {}
    child = Child()
    restored = child.restore(pieces)
    assert (restored.names, restored.lost, restored.differences) == (about.names, {}, {})
    return child
