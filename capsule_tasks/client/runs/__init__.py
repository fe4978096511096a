"""`capsule.runs`: durable runs of agents as Celery tasks, from a producer."""
