"""Warns when children lack files and pipes that the worker opened before its pool.

A fork of the worker has them, as under prefork. A child that imports the app afresh has only what
the import opens.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Hashable
from typing import Any

import click

from capsule_tasks.system.descriptors import is_kept, targets
from capsule_tasks.system.portable import IS_LINUX

log = logging.getLogger("capsule_tasks.taskpool")

_IGNORED = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")


class DescriptorCheck:
    """Knows what a fork of the worker inherits, as of the moment when this is made."""

    def __init__(self, app: Any) -> None:
        self._opened = _opened(app) if IS_LINUX else {}
        self._checked: Hashable = None
        self._missing: set[str] = set()

    def check(self, pid: int, origin: Hashable) -> None:
        """Compare a child that is ready with the worker; `origin` is what children come from.

        One child of each origin is checked, and a descriptor is named once.
        """
        if not self._opened or origin == self._checked:
            return
        self._checked = origin
        try:
            has = set(targets(pid).values())
        except OSError:  # the child has ended, or reading is not permitted
            return
        still_open = targets()
        missed = {
            number: target
            for number, target in self._opened.items()
            if still_open.get(number) == target and target not in has | self._missing
        }
        if missed:
            self._missing |= set(missed.values())
            log.warning(
                "children import the app afresh and do not have what this worker has open: %s. "
                "Open it when the app is imported, or in worker_process_init",
                ", ".join(f"{target} (descriptor {n})" for n, target in sorted(missed.items())),
            )


def _opened(app: Any) -> dict[int, str]:
    """The app's own: neither the standard streams nor what Celery keeps in its main process."""
    found = targets()
    others = {found.get(number) for number in (0, 1, 2)}.union(_IGNORED)
    state_db = _state_db(app)
    return {
        number: target
        for number, target in found.items()
        if is_kept(number, target)
        and target not in others
        and not (state_db and target.startswith(state_db))
    }


def _state_db(app: Any) -> str:
    """The path of `--statedb`, which its files begin with."""
    context = click.get_current_context(silent=True)
    path = (context and context.params.get("statedb")) or app.conf.worker_state_db
    return os.path.realpath(path) if path else ""
