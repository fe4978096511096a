"""`celery capsule …`: watch, stop and answer executions from a terminal or a script.

Celery loads this package through an entry point for each of its commands, `celery worker` included.
That is why rich is imported only by the commands that draw. Options before `capsule`, such as
`-A app`, work as for Celery's own commands.
"""

from capsule_tasks.cli import run_commands, session_commands  # noqa: F401 - add their commands
from capsule_tasks.cli.commands import capsule

__all__ = ["capsule"]
