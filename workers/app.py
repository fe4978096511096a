"""The stock app. It is configured by `celeryconfig.py`, and imports the tasks that it names."""

from __future__ import annotations

from celery import Celery

from capsule_tasks import Capsule

app = Celery("workers")
Capsule(app)
app.config_from_object("celeryconfig")
