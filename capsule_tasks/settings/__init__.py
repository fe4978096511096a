"""Every setting of the package, typed, with its limits.

A setting is declared once, as a field of a `Settings` struct; a value outside its limits raises
InvalidSetting, which names the setting, the value and the limits. The modules are the domains:

- `child`: what a child is sent in `Hello`, its sandbox included;
- `sessions`: how a parent treats its children, and how many it keeps;
- `worker`: the `capsule_…` settings of a Celery app;
- `code`: the profiles of code that producers send;
- `executions`: what workers publish of tasks, and how long Redis retains it;
- `storage`: connections to Redis, retries, histories, durable runs, named sessions, steps;
- `environment`: what the environment of a process says;
- `declared`: how settings are declared.

A module is loaded when one of its names is first asked for (PEP 562): a session's child imports
this package at every start.
"""

from importlib import import_module
from typing import TYPE_CHECKING

_MODULES = (
    *("declared", "environment", "child"),  # a child needs no others
    *("sessions", "storage", "executions", "worker", "code"),
)

if TYPE_CHECKING:
    from capsule_tasks.settings.child import *
    from capsule_tasks.settings.code import *
    from capsule_tasks.settings.declared import *
    from capsule_tasks.settings.environment import *
    from capsule_tasks.settings.executions import *
    from capsule_tasks.settings.sessions import *
    from capsule_tasks.settings.storage import *
    from capsule_tasks.settings.worker import *
else:

    def __getattr__(name: str) -> object:
        for module in () if name.startswith("_") else _MODULES:
            home = import_module(f"{__name__}.{module}")
            if hasattr(home, name):
                return globals().setdefault(name, getattr(home, name))
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
