"""The role for code: a worker that runs what callers send, and holds their named sessions.

    celery -A workers.sessions worker -Q code

It imports none of the app's tasks, so their code and what they open are in no process of this
worker. `celeryconfig.py` routes the tasks `capsule.*` to the queue `code`.
"""

from __future__ import annotations

import os

from celery import Celery

from capsule_tasks import Capsule

app = Celery("sessions")
Capsule(app)
app.config_from_object("celeryconfig")
app.conf.update(
    imports=(),
    capsule_code_profiles={
        "sandbox": {
            # Fresh sessions that are ready before the next code comes.
            "warm": 2,
            # Named sessions; each has a process. Beyond them the longest idle one is checkpointed
            # and makes room.
            "max_live": int(os.environ.get("CAPSULE_MAX_LIVE", "50")),
            # A session that nobody has used for half an hour is checkpointed and released.
            "idle_timeout_s": 1800,
            # What a crash of the worker costs a namespace at most.
            "checkpoint_every": 20,
        },
    },
)
