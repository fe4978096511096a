"""Celery tasks and code executions that run in warm, isolated subprocess sessions.

Public names are loaded when they are first asked for (PEP 562): a session's child imports this
package at every start and must not pay for the parent's side.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from capsule_tasks.child.io.capture import progress
    from capsule_tasks.client import Capsule, Execution, GroupExecution, step
    from capsule_tasks.errors import EffectUncertain, ExecutionCancelled
    from capsule_tasks.sessions import Session, SessionConfig, SessionPool
    from capsule_tasks.settings import (
        ChildSettings,
        LimitSettings,
        PoolSettings,
        Profile,
        SandboxSettings,
    )
    from capsule_tasks.storage import History, SyncHistory

__version__ = "0.1.0.dev0"

__all__ = [
    "Capsule",
    "ChildSettings",
    "EffectUncertain",
    "Execution",
    "ExecutionCancelled",
    "GroupExecution",
    "History",
    "LimitSettings",
    "PoolSettings",
    "Profile",
    "SandboxSettings",
    "Session",
    "SessionConfig",
    "SessionPool",
    "SyncHistory",
    "__version__",
    "progress",
    "step",
]

_HOME_OF = {
    "Capsule": "capsule_tasks.client",
    "ChildSettings": "capsule_tasks.settings",
    "EffectUncertain": "capsule_tasks.errors",
    "Execution": "capsule_tasks.client",
    "ExecutionCancelled": "capsule_tasks.errors",
    "GroupExecution": "capsule_tasks.client",
    "History": "capsule_tasks.storage",
    "LimitSettings": "capsule_tasks.settings",
    "PoolSettings": "capsule_tasks.settings",
    "Profile": "capsule_tasks.settings",
    "SandboxSettings": "capsule_tasks.settings",
    "Session": "capsule_tasks.sessions",
    "SessionConfig": "capsule_tasks.sessions",
    "SessionPool": "capsule_tasks.sessions",
    "SyncHistory": "capsule_tasks.storage",
    "progress": "capsule_tasks.child.io.capture",
    "step": "capsule_tasks.client.steps",
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
