"""The producer's side, and what the code of tasks uses. Celery is known here."""

from capsule_tasks.client.steps import Steps, step

__all__ = ["Steps", "step"]
