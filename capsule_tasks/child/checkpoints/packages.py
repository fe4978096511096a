"""Versions of Python and of the packages that a namespace uses."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from capsule_tasks.protocol.values import sendable

_NO_PACKAGES = sys.stdlib_module_names | {"__main__", "capsule_tasks"}
_MAX_SHOWN = 100


def python_version() -> str:
    return ".".join(map(str, sys.version_info[:3]))


def versions_of(modules: Iterable[str]) -> dict[str, str]:
    """The versions of the packages that these modules belong to, as far as they have one."""
    names = {module.partition(".")[0] for module in modules} - _NO_PACKAGES
    found = {name: version_of(name) for name in sorted(names)}
    return {sendable(name): version for name, version in found.items() if version}


def version_of(name: str) -> str:
    """The version of a package that can be imported under this name; empty if it has none.

    Most packages are installed under the name of their module. Those that are not usually say their
    version themselves; to look through the files of all installed packages would take far longer.
    """
    from importlib import metadata

    try:
        version: object = metadata.version(name)
    except Exception:
        version = getattr(sys.modules.get(name), "__version__", "")
    return sendable(version)[:_MAX_SHOWN] if isinstance(version, str) else ""


def differences(saved: dict[str, str]) -> dict[str, str]:
    """Packages, and `python`, that have another version here, with both versions."""
    present = {name: python_version() if name == "python" else version_of(name) for name in saved}
    return {
        name: f"saved under {saved[name]}, here {here or 'not installed'}"
        for name, here in present.items()
        if here != saved[name]
    }
