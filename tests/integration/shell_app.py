"""The app of the tests of `celery capsule shell`, on the Redis that the environment names."""

from __future__ import annotations

import os

from celery import Celery

app = Celery(broker=os.environ["TEST_REDIS_URL"], backend=os.environ["TEST_REDIS_URL"])
app.conf.capsule_prefix = os.environ["TEST_PREFIX"]
