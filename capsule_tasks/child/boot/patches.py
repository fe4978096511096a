"""Changes to modules of the standard library, made when user code imports them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from capsule_tasks.child.io.input import InputRequests
from capsule_tasks.child.stopping.interrupter import uninterruptible

Patch = Callable[[Any], None]


def install(inputs: InputRequests) -> None:
    """Have `getpass` ask the watcher of the execution, and `subprocess` heed a stop."""

    def patch_getpass(module: Any) -> None:
        module.getpass = module.unix_getpass = inputs.getpass

    patches: dict[str, Patch] = {"subprocess": _patch_subprocess, "getpass": patch_getpass}
    for name in list(patches):
        if name in sys.modules:
            patches.pop(name)(sys.modules[name])
    sys.meta_path.insert(0, _PatchingFinder(patches))


def _patch_subprocess(module: Any) -> None:
    """Have a stop leave no process behind, and not wait for one.

    A stop that is raised between the fork and the assignment of the Popen object would lose the
    process. So these steps are not interrupted; for `__init__` the frame of `start_uninterrupted`
    sees to that. After an interrupt Popen waits 0.25 s for the process to react to the same Ctrl-C;
    the signal of a session reaches this process alone.
    """
    start = module.Popen.__init__

    @wraps(start)
    def start_uninterrupted(popen: Any, *args: Any, **options: Any) -> None:
        start(popen, *args, **options)

    module.Popen.__init__ = start_uninterrupted
    module.Popen._sigint_wait_secs = property(lambda _: 0, lambda *_: None)  # noqa: SLF001 - no public knob
    uninterruptible(module.run, module.call, module.Popen.__enter__)


class _PatchingFinder:
    """Finds modules as usual, and patches those few after they have been executed."""

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
