"""Every error the package raises. The branches under the root say who has to act.

An error is declared as a class with its fields and a template of its message (`base.described`).
The modules are the domains:

- `base`: the root and the branches, wrong settings and ids;
- `sessions`: sessions, pools, what confines them, and the channels to their children;
- `executions`: executions, attempts, questions and results;
- `storage`: Redis, histories, leases;
- `runs`: durable runs, their snapshots, approvals and tool calls; steps of tasks;
- `agents`: the ends of runs of our own engine;
- `realtime`: realtime sessions.

A module is loaded when one of its names is first asked for (PEP 562): a session's child imports
this package at every start.
"""

from importlib import import_module
from typing import TYPE_CHECKING

_MODULES = ("base", "sessions", "executions", "storage", "runs", "agents", "realtime")

if TYPE_CHECKING:
    from capsule_tasks.errors.agents import *
    from capsule_tasks.errors.base import *
    from capsule_tasks.errors.executions import *
    from capsule_tasks.errors.realtime import *
    from capsule_tasks.errors.runs import *
    from capsule_tasks.errors.sessions import *
    from capsule_tasks.errors.storage import *
else:

    def __getattr__(name: str) -> object:
        for module in () if name.startswith("_") else _MODULES:
            home = import_module(f"{__name__}.{module}")
            if hasattr(home, name):
                return globals().setdefault(name, getattr(home, name))
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
