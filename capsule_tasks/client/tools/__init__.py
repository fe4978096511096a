"""Tools of agents whose calls run elsewhere: as a Celery task, or as code in a named session.

The id of the execution is derived from the run and the key of the call, so that whoever makes the
call again, after a process was lost, finds the execution and waits for it.
"""

from capsule_tasks.client.tools.code import code_tool
from capsule_tasks.client.tools.tasks import task_tool

__all__ = ["code_tool", "task_tool"]
