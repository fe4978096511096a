"""`celery capsule …`: watch, stop and answer executions from a terminal or a script.

Celery's own command line loads it through its plugin entry point, so `-A app` and everything else
in front of it work as for Celery's commands.
"""

from capsule_tasks.cli.commands import capsule

__all__ = ["capsule"]
