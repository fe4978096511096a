"""Names that we use beyond the documentation of their packages: each is there, and is listed."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import sys
import types
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from celery.app.registry import TaskRegistry
from celery.app.task import Task
from celery.worker.autoscale import Autoscaler
from celery.worker.request import Request
from kombu.transport.redis import QoS

import capsule_tasks
from capsule_tasks.client import task
from capsule_tasks.client.capsule import TaskMixin
from capsule_tasks.client.task import mixed
from capsule_tasks.taskpool.consumer_step import SlotScaler
from capsule_tasks.taskpool.reporting.requests import PoolRequest
from capsule_tasks.taskpool.stock_redis.batched_acks import BatchedAckQoS, RenewalMarkQoS
from tests.unit.private_names import NAMES
from tests.unit.private_names.entries import Names

PACKAGE = Path(capsule_tasks.__file__).parent
LISTED = {f"{names.owner}:{name}" for names in NAMES for name in names.shapes}

# --- what is listed is there ---------------------------------------------------------------------


def shape_of(path: str) -> str:
    """The shape of `module:Class:name`, as tests/unit/private_names has it. LookupError if none."""
    module, *names = path.split(":")
    owner: Any = None
    found: Any = importlib.import_module(module)
    for name in ".".join(names).split("."):
        owner, found = found, inspect.getattr_static(found, name, None)
        found = found.__func__ if isinstance(found, (classmethod, staticmethod)) else found
    name = names[-1]
    if found is None or isinstance(found, types.MemberDescriptorType):
        # Set on instances; or None until then.
        expression = assigned(owner, name)
        if expression is not None:
            return f"= {expression}"
        if inspect.getattr_static(owner, name, owner) is owner:
            raise LookupError(f"{owner!r} has no {name}")
    if inspect.isbuiltin(found):
        return "builtin"
    if inspect.isfunction(found):
        return signature(found)
    return "class" if inspect.isclass(found) else type(found).__name__


def signature(function: Any) -> str:
    """Without annotations."""
    found = inspect.signature(function)
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in found.parameters.values()
    ]
    return str(inspect.Signature(parameters))


def assigned(owner: Any, name: str) -> str | None:
    """The expression that a class, one of its bases, or a function sets an attribute to.

    The first that is more than None.
    """
    if inspect.ismodule(owner):
        return None
    found = (
        ast.unparse(value)
        for place in (inspect.getmro(owner)[:-1] if inspect.isclass(owner) else (owner,))
        for node in ast.walk(tree_of(place))
        for target, value in assignments(node)
        if isinstance(target, ast.Attribute) and target.attr == name
    )
    return next((text for text in found if text != "None"), None)


@cache
def tree_of(place: Any) -> ast.AST:
    """The definition of a class or function."""
    tree: Any = tree_of_module(place.__module__)
    for name in qualname(place).split("."):
        found = (node for node in tree.body if getattr(node, "name", None) == name)
        tree = next(found, ast.Module([], []))
    return tree


@cache
def tree_of_module(name: str) -> ast.Module:
    return ast.parse(inspect.getsource(sys.modules[name]))


def qualname(place: Any) -> str:
    """Celery's steps have the module in theirs."""
    return str(place.__qualname__).removeprefix(f"{place.__module__}.")


def assignments(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        yield node.target, node.value
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                yield from zip(target.elts, node.value.elts, strict=True)
            else:
                yield target, node.value


def is_as_listed(found: str, listed: str) -> bool:
    if listed.endswith("…"):
        return found.startswith(listed[:-1])
    if not listed.startswith("(… "):
        return found == listed
    parameters = listed[3:-1].split(", ")
    return all(re.search(rf"[(\s]{re.escape(name)}[=,)]", found) for name in parameters)


@pytest.mark.parametrize("names", NAMES, ids=lambda names: names.owner)
def test_names_are_where_they_were_and_what_they_were(names: Names) -> None:
    changed = []
    for name, listed in names.shapes.items():
        try:
            found = shape_of(f"{names.owner}:{name}")
        except (ImportError, LookupError) as error:
            found = f"gone ({error})"
        if not is_as_listed(found, listed):
            changed.append(f"{name} was {listed} and is {found}")
    assert changed == [], f"{names.owner} has changed; used for: {names.use}"


# --- what is used is listed ----------------------------------------------------------------------

DOCUMENTED = {
    *("_exit", "_getframe", "_current_frames"),  # of os and sys
    *("_replace", "_asdict", "_fields", "_make"),  # of named tuples
    "_value_",  # of enums
}
TEXT_METHODS = ("endswith", "removeprefix", "removesuffix", "startswith")


def is_private(name: str) -> bool:
    """Not one with two underscores, for most of those are Python's."""
    begins = name.startswith("_") and not name.startswith("__") and name != "_"
    return begins and name.isidentifier() and name not in DOCUMENTED


def own_names(tree: ast.AST) -> Counter[str]:
    """Names that a module defines: functions, classes, variables, attributes of self and cls."""
    found = Counter[str]()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                found[node.name] += 1
            case ast.Name(id=name, ctx=ast.Store()):
                found[name] += 1
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                found[name] += 1
            case ast.alias(asname=str(name)):
                found[name] += 1
    return found


def private_uses(tree: ast.AST, own: Counter[str], ours: Counter[str]) -> Iterator[tuple[int, str]]:
    """Private names that a module uses of something that is not its own; `ours` are the package's.

    A name that the module also defines for an object of its own is not found.
    """
    texts = set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr=name):
                known = {each for each, count in ours.items() if count > 1}  # of a base of ours
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name):
                known = ours.keys()
            case ast.Attribute(attr=name):
                known = own.keys()
            case ast.ImportFrom(module=str(module)) if not module.startswith("capsule_tasks"):
                yield from (
                    (node.lineno, each.name) for each in node.names if is_private(each.name)
                )
                continue
            case ast.JoinedStr():
                texts |= set(ast.walk(node))
                continue
            case ast.Call(func=ast.Attribute(attr=name)) if name in TEXT_METHODS:
                texts |= set(ast.walk(node))
                continue
            case ast.Constant(value=str(name)) if node not in texts:
                known = ours.keys()
            case _:
                continue
        if is_private(name) and name not in known:
            yield node.lineno, name


def test_each_private_name_that_is_used_is_listed() -> None:
    names = {path.rpartition(":")[2] for path in LISTED}
    trees = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
    own = {path: own_names(tree) for path, tree in trees.items()}
    ours = sum(own.values(), Counter[str]())
    unlisted = [
        f"{path.relative_to(PACKAGE)}:{line} {name}"
        for path, tree in trees.items()
        for line, name in private_uses(tree, own[path], ours)
        if name not in names
    ]
    assert unlisted == [], "list them in tests/unit/private_names"


SAMPLE = """
from celery._state import _task_stack
class Ours(Theirs):
    def _mine(self):
        self._own = self._theirs
        super()._overridden()
        return [other._own, other._foreign, getattr(other, "_named")]
"""


def test_uses_are_found() -> None:
    tree = ast.parse(SAMPLE)
    own = own_names(tree)
    found = {name for _, name in private_uses(tree, own, own)}
    assert found == {"_task_stack", "_theirs", "_overridden", "_foreign", "_named"}


LIBRARIES = ("billiard", "celery", "kombu", "redis")
MIXED = (
    *(
        mixed(task.Task, Task),
        mixed(TaskMixin, TaskRegistry),
        mixed(SlotScaler, Autoscaler),
        mixed(PoolRequest, Request),
    ),
    *(mixed(BatchedAckQoS, QoS), mixed(RenewalMarkQoS, QoS)),
)
"""Classes that are made when a worker or an app starts."""
OF_EVERY_CLASS = set(dir(type("Any", (), {}))) - {"__init__"} | {
    *("__annotations__", "__firstlineno__", "__static_attributes__", "name"),
}


def test_each_name_that_is_overridden_is_listed() -> None:
    unlisted = {path for kind in classes() for path in overridden(kind)} - LISTED
    assert unlisted == set(), "list them in tests/unit/private_names"


def classes() -> Iterator[Any]:
    """Our classes, where these libraries may be imported."""
    yield from MIXED
    for package in ("cli", "client", "storage", "taskpool"):
        path = str(PACKAGE / package)
        for module in pkgutil.walk_packages([path], f"capsule_tasks.{package}."):
            if not module.name.endswith("__main__"):
                members = vars(importlib.import_module(module.name)).values()
                yield from filter(inspect.isclass, members)


def overridden(kind: Any) -> Iterator[str]:
    """Names that a class of ours overrides from a base class of these libraries."""
    mro = inspect.getmro(kind)
    ours = list(takewhile(is_ours, mro))
    theirs = [base for base in mro[len(ours) :] if base.__module__.split(".")[0] in LIBRARIES]
    for name in set().union(*map(vars, ours)) - OF_EVERY_CLASS:
        base = next((base for base in theirs if name in vars(base)), None)
        if base is not None:
            yield f"{base.__module__}:{qualname(base)}:{name}"


def is_ours(kind: Any) -> bool:
    return kind in MIXED or kind.__module__.startswith("capsule_tasks")
