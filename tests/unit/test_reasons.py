"""A log line that ends in an error describes the error even if the error has no text."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import capsule_tasks
from capsule_tasks import errors

PACKAGE = Path(capsule_tasks.__file__).parent
_OWN = {
    name
    for module in pkgutil.iter_modules(errors.__path__, f"{errors.__name__}.")
    for name, kind in vars(importlib.import_module(module.name)).items()
    if isinstance(kind, type) and issubclass(kind, errors.CapsuleError)
}
"""Errors that always have a text."""


def _in_log_calls(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Names of caught errors that are logged as they are, if they may say nothing."""
    for handler in ast.walk(tree):
        if not isinstance(handler, ast.ExceptHandler) or handler.name is None:
            continue
        kinds = {
            node.id for node in ast.walk(handler.type or handler) if isinstance(node, ast.Name)
        }
        if kinds <= _OWN:
            continue
        for call in ast.walk(handler):
            if (
                isinstance(call, ast.Call)
                and isinstance(call.func, ast.Attribute)
                and (ast.unparse(call.func.value) == "log" or call.func.attr == "warn_seldom")
            ):
                for argument in call.args[1:]:
                    if isinstance(argument, ast.Name) and argument.id == handler.name:
                        yield call.lineno, ast.unparse(call)


def test_no_line_of_the_package_ends_in_an_empty_reason() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {call}: log reason_of({call})"
        for path in PACKAGE.rglob("*.py")
        for line, call in _in_log_calls(ast.parse(path.read_text()))
    ]
    assert not found
