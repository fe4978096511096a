"""Changes to standard modules that are made when, and only when, user code imports them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from capsule_tasks.child.io.input import InputRequests
from capsule_tasks.child.stopping.interrupts import uninterruptible

Patch = Callable[[Any], None]


def install(inputs: InputRequests | None) -> None:
    """Have `getpass` ask the watcher, if there is one; and `subprocess` heed an interrupt."""
    patches: dict[str, Patch] = {"subprocess": _patch_subprocess}
    if inputs is not None:

        def patch_getpass(module: Any) -> None:
            module.getpass = module.unix_getpass = inputs.getpass

        patches["getpass"] = patch_getpass
    for name in list(patches):
        if name in sys.modules:
            patches.pop(name)(sys.modules[name])
    sys.meta_path.insert(0, _PatchingFinder(patches))


def _patch_subprocess(module: Any) -> None:
    """Popen gives a child 0.25 s to react to the same Ctrl-C; a session's signal is ours alone.

    A stop that came between the fork and the moment the process has an owner would leave it
    behind, so these steps are not interrupted: `__init__` by the frame of this package below it.
    """
    begin = module.Popen.__init__

    @wraps(begin)
    def begin_whole(popen: Any, *args: Any, **options: Any) -> None:
        begin(popen, *args, **options)

    module.Popen.__init__ = begin_whole
    module.Popen._sigint_wait_secs = property(lambda _: 0, lambda *_: None)  # noqa: SLF001 - no public knob
    uninterruptible(module.run, module.call, module.Popen.__enter__)


class _PatchingFinder:
    """Finds the few modules to patch as usual, and patches them once they have run."""

    def __init__(self, patches: dict[str, Patch]) -> None:
        self._patches = patches

    def find_spec(
        self, name: str, path: Any = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        patch = self._patches.get(name)
        if patch is None:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            _run_after(spec.loader, patch)
        return spec


def _run_after(loader: Any, patch: Patch) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        patch(module)

    loader.exec_module = exec_module
