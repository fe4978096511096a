"""Whatever names share, and whichever are lost: what comes back is what was saved."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.child.checkpoints.namespaces import Child, namespace_of, saved


class Model:
    """An instance of a class that is not there when the namespace is restored."""

    def __init__(self, *parts: Any) -> None:
        self.parts = list(parts)


Model.__module__, Model.__qualname__ = "plugin_of_model", "Model"
TEXTS = ("a", "weights", "parts", "x1", "text that is longer than others")
KINDS: dict[str, Any] = {
    "list": list,
    "tuple": tuple,
    "dict": lambda parts: dict(enumerate(parts)),
    "of text": lambda parts: {
        TEXTS[number % len(TEXTS)]: part for number, part in enumerate(parts)
    },
    "nested": lambda parts: [[part, "a"] for part in parts],
    "model": lambda parts: Model(*parts),
    "holds model": lambda parts: [*parts, Model()],
}
Parts = list[int | str]
specifications = st.lists(
    st.tuples(
        st.sampled_from([*KINDS]),
        st.lists(st.integers(0, 30) | st.sampled_from(TEXTS), max_size=4),
    ),
    max_size=12,
)


def values_of(specification: list[tuple[str, Parts]]) -> dict[str, Any]:
    """Variables that hold earlier ones, by their number, and texts."""
    values: list[Any] = []
    for kind, parts in specification:
        held = [values[p % len(values)] if values and isinstance(p, int) else p for p in parts]
        values.append(KINDS[kind](held))
    return {f"x{number}": value for number, value in enumerate(values)}


def parts_of(value: Any) -> list[Any]:
    match value:
        case list() | tuple():
            return list(value)
        case dict():
            return [*value.keys(), *value.values()]
        case Model():
            return value.parts
    return []


def reached(value: Any) -> dict[int, Any]:
    """All objects of a value but texts and numbers, by id."""
    found: dict[int, Any] = {}
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if id(each) not in found and not isinstance(each, (str, int)) and each != ():
            found[id(each)] = each
            waiting += parts_of(each)
    return found


class Twins:
    """Compares objects that were saved with those that came back, each with one and the same."""

    def __init__(self) -> None:
        self.twin_of: dict[int, int] = {}
        self.known: list[Any] = []

    def check(self, old: Any, new: Any) -> None:
        assert type(new) is type(old)
        if isinstance(old, (str, int)) or old == ():
            assert new == old
            return
        if id(old) in self.twin_of:
            assert self.twin_of[id(old)] == id(new)
            return
        assert id(new) not in self.twin_of.values()
        self.twin_of[id(old)] = id(new)
        self.known.append(new)
        assert len(parts_of(new)) == len(parts_of(old))
        for one, other in zip(parts_of(old), parts_of(new), strict=True):
            self.check(one, other)


@pytest.fixture(scope="module")
def plugin() -> ModuleType:
    module: Any = ModuleType("plugin_of_model")
    module.Model = Model
    return module


@given(specification=specifications)
def test_what_comes_back_is_what_was_saved(
    plugin: ModuleType, specification: list[tuple[str, Parts]]
) -> None:
    values = values_of(specification)
    namespace = namespace_of("def f(): return 1\n")
    namespace.update(values)
    namespace.update(namespace_of("class C: pass\nc = C()\ndef g(x=c): return x"))
    sys.modules["plugin_of_model"] = plugin
    try:
        pieces, about = saved(namespace)
        assert about.skipped == {}
        sys.modules["plugin_of_model"] = None  # type: ignore[assignment]
        child = Child()
        restored = child.restore(pieces)
    finally:
        del sys.modules["plugin_of_model"]
    lost = set(restored.lost)
    twins = Twins()
    for name in values.keys() - lost:
        twins.check(values[name], child.module.__dict__[name])
    objects = {name: reached(value) for name, value in values.items()}
    for name, value in values.items():
        needs_plugin = any(isinstance(each, Model) for each in objects[name].values())
        shares = any(objects[name].keys() & objects[other].keys() for other in lost - {name})
        assert (name in lost) >= needs_plugin
        assert (name in lost) <= (needs_plugin or shares), (value, restored.lost)
    assert lost <= values.keys()
    assert child.value("(f(), type(c) is C, g() is c)") == (1, True, True)
