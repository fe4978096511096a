"""How to save what pickle and cloudpickle cannot save, or save as something else.

Checkpoints name the functions `make_…` and `fill_cell` by their path: it must stay as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CellType, FunctionType, MappingProxyType
from typing import Any

from capsule_tasks.child.executors.namespace import is_users


def function_of_session(function: FunctionType, reduced: Any) -> Any:
    """Reduce a function as cloudpickle does, but without values of globals, and with its own cells.

    The namespace has the globals under their own names. With a function, one that cannot be saved
    would cost the function, and a restore of the function would undo a later assignment.
    Cloudpickle copies cells, so that two functions would no longer share a variable.
    """
    make, (code, namespace, *others, _), (state, slots), *rest = reduced
    values = slots["__globals__"]
    slots["__globals__"] = {name: values[name] for name in values if not is_users(name)}
    slots["__closure__"] = None
    for name, value in slots.items():
        if type(value) is list:  # modules to import, which those in the namespace bring along
            slots[name] = []
    return make, (code, namespace, *others, function.__closure__), (state, slots), *rest


def _reduce_cell(cell: CellType) -> Any:
    try:
        contents = cell.cell_contents
    except ValueError:
        return make_cell, ()
    return make_cell, (), (contents,), None, None, fill_cell


def make_cell() -> CellType:
    return CellType()


def fill_cell(cell: CellType, contents: tuple[Any]) -> None:
    (cell.cell_contents,) = contents


def _reduce_cached(cached: Any) -> Any:
    if cached.__module__ != "__main__":
        return cached.__qualname__  # by reference, as pickle does
    return make_cached, (cached.__wrapped__, cached.cache_parameters())


def make_cached(function: Any, parameters: dict[str, Any]) -> Any:
    """A function with a cache, which is empty."""
    return functools.lru_cache(**parameters)(function)


def _reduce_property(cached: functools.cached_property[Any]) -> Any:
    return make_property, (cached.func, cached.attrname)


def make_property(function: Any, name: str | None) -> functools.cached_property[Any]:
    made = functools.cached_property(function)
    made.attrname = name
    return made


def _reduce_proxy(proxy: MappingProxyType[Any, Any]) -> Any:
    return MappingProxyType, (dict(proxy),)


REDUCERS: dict[type, Callable[[Any], Any]] = {
    CellType: _reduce_cell,
    type(functools.cache(len)): _reduce_cached,
    functools.cached_property: _reduce_property,
    MappingProxyType: _reduce_proxy,
}
