"""The stock app. It is configured by `celeryconfig.py`, and imports the tasks that it names."""

from __future__ import annotations

from celery import Celery

app = Celery("workers")
app.config_from_object("celeryconfig")
