"""The producer's side: what an application that sends tasks imports.

An `Execution` is made from an id and holds no state. Redis is the truth: a doorbell wakes a
watcher, which then reads the events after the last one it has seen. So any number of watchers may
watch, late or twice, and a watcher that lost its connection resumes where it was.
"""

from capsule_tasks.client.capsule import Capsule
from capsule_tasks.client.execution import EagerExecution, Execution, Snapshot
from capsule_tasks.client.group import Failure, GroupExecution, GroupState
from capsule_tasks.client.sessions.execution import SessionExecution
from capsule_tasks.client.sessions.named_session import NamedSession
from capsule_tasks.client.steps import Steps, step
from capsule_tasks.client.task import Task
from capsule_tasks.storage.executions.types import Event

__all__ = [
    "Capsule",
    "EagerExecution",
    "Event",
    "Execution",
    "Failure",
    "GroupExecution",
    "GroupState",
    "NamedSession",
    "SessionExecution",
    "Snapshot",
    "Steps",
    "Task",
    "step",
]
