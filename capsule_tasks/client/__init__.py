"""The producer's side, and what the code of tasks uses of it."""

from capsule_tasks.client.capsule import Capsule
from capsule_tasks.client.execution import EagerExecution, Execution
from capsule_tasks.client.steps import Steps, step
from capsule_tasks.client.task import Task

__all__ = ["Capsule", "EagerExecution", "Execution", "Steps", "Task", "step"]
