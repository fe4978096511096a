"""A Django project as small as one can be."""

import os

SECRET_KEY = "of a test"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ.get("TEST_DATABASE", ":memory:"),
        "OPTIONS": {"timeout": 20},
    }
}
INSTALLED_APPS = ["django.contrib.contenttypes", "django_celery_results", "django_celery_beat"]
CELERY_BROKER_URL = os.environ.get("REDIS_URL", "redis://localhost")
CELERY_RESULT_BACKEND = "django-db"
CELERY_TASK_DEFAULT_QUEUE = os.environ.get("TEST_QUEUE", "celery")
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_BEAT_SCHEDULER = "django_celery_beat.schedulers:DatabaseScheduler"
CELERY_WORKER_POOL = os.environ.get("TEST_POOL", "capsule_tasks.taskpool:TaskPool")
CELERY_RESULT_EXTENDED = True
