"""The app of the examples of our own engine."""

import os

from celery import Celery

from capsule_tasks import Capsule

REDIS_URL = os.environ.get("REDIS_URL", "redis://localhost:6379/0")

app = Celery("shop", broker=REDIS_URL, backend=REDIS_URL, include=["refunds", "analyst", "triage"])
capsule = Capsule(app)
