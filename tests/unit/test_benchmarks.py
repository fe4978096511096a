"""The benchmarks, which the suite does not run, can be imported."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from celery import _state

from tests.architecture_page import ROOT

MODULES = sorted((ROOT / "tests/benchmarks").rglob("*.py"))
OWN = ("capsule_tasks", "tests")
OF_OTHER_EXTRAS = {"jupyter_client": ("BlockingKernelClient", "KernelManager")}
"""Packages that the suite's environment may lack, with what the benchmarks take from them."""


@pytest.fixture
def other_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, members in OF_OTHER_EXTRAS.items():
        if importlib.util.find_spec(name) is None:
            substitute = ModuleType(name)
            vars(substitute).update(dict.fromkeys(members, object))
            monkeypatch.setitem(sys.modules, name, substitute)


def own_imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Each module of ours that is imported anywhere in the code, with the name taken from it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in OWN:
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((a.name, "") for a in node.names if a.name.split(".")[0] in OWN)


@pytest.fixture
def current_app() -> Iterator[None]:
    """An imported app becomes the current one, which other tests must not notice."""
    before = _state.get_current_app()
    yield
    before.set_current()


@pytest.mark.usefixtures("other_extras", "current_app")
@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_a_benchmark_can_be_imported(path: Path) -> None:
    importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    for module, name in own_imports(ast.parse(path.read_text())):
        imported = importlib.import_module(module)
        assert not name or hasattr(imported, name) or importlib.util.find_spec(f"{module}.{name}")
