"""The producer's side: what an application that sends tasks imports."""

from capsule_tasks.client.capsule import Capsule
from capsule_tasks.client.execution import EagerExecution, Execution
from capsule_tasks.client.task import Task

__all__ = ["Capsule", "EagerExecution", "Execution", "Task"]
