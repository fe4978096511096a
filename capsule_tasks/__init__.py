"""Celery tasks and code executions that run in warm, isolated subprocess sessions.

Public names are loaded when they are first asked for (PEP 562): a session's child imports this
package at every start and must not pay for the parent's side.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from capsule_tasks.sessions import Session, SessionConfig

__version__ = "0.1.0.dev0"

__all__ = ["Session", "SessionConfig", "__version__"]

_HOME_OF = {
    "Session": "capsule_tasks.sessions",
    "SessionConfig": "capsule_tasks.sessions",
}


def __getattr__(name: str) -> object:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(globals().keys() | set(__all__))
