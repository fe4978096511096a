"""The pool's place in Celery's consumer: it learns which consumer there is."""

from __future__ import annotations

from typing import Any

from celery import bootsteps


class ConsumerStep(bootsteps.StartStopStep):
    """Tells the pool of the consumer, whose prefetch counter grows with coroutines that run."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def start(self, parent: Any) -> None:
        introduce = getattr(parent.pool, "introduce", None)
        if introduce is not None:
            introduce(parent)
