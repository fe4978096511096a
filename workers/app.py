"""The stock app. `celeryconfig.py` has its settings, and names the modules of its tasks."""

from __future__ import annotations

from celery import Celery

from capsule_tasks import Capsule

app = Celery("workers")
capsule = Capsule(app)
app.config_from_object("celeryconfig")
