"""Settings of the stock app, each with its reason. All others have Celery's defaults."""

import os

from kombu import Queue

broker_url = os.environ.get("CAPSULE_BROKER_URL", os.environ.get("REDIS_URL", "redis://localhost"))
result_backend = os.environ.get("CAPSULE_RESULT_URL", broker_url)

# The pool: every task runs in a session.
worker_pool = "capsule_tasks.taskpool:TaskPool"

# Code that callers send has a queue of its own, so that a deployment may give it workers of its own
# (`workers/sessions.py`). A worker without `-Q` takes from both queues.
task_queues = [Queue("celery"), Queue("code")]
task_default_queue = "celery"
task_routes = {"capsule.*": {"queue": "code"}}

# Named sessions that a worker holds. 0 where workers of the role `sessions` hold them.
capsule_code_profiles = {"sandbox": {"max_live": int(os.environ.get("CAPSULE_MAX_LIVE", "10"))}}

# The modules that hold the tasks.
imports = ("workers.pipeline",)

# A message is acknowledged when its task has ended, so that no message is lost with a worker. If
# only the child of a task dies, the message is requeued only for tasks that may run twice
# (`reject_on_worker_lost`).
task_acks_late = True

# Two messages per child: one runs and one waits. With more, messages wait behind a long task; with
# fewer, a child waits for the network between two short tasks.
worker_prefetch_multiplier = 2

# A message whose worker died is redelivered after this time. The pool renews its unacknowledged
# messages, so that tasks may run longer than this. The value is Celery's default, which also suits
# prefork workers on the same queues.
broker_transport_options = {"visibility_timeout": 3600}

# No task runs for ever: SoftTimeLimitExceeded lets it clean up, and the hard limit kills it.
task_soft_time_limit = 55 * 60
task_time_limit = 58 * 60

# Flower and `celery events` show tasks from the moment that they are sent.
worker_send_task_events = True
task_send_sent_event = True

# Results show the state STARTED once a task runs, instead of PENDING.
task_track_started = True

# No pickle: reading a message or a result must never run code.
accept_content = ["json", "msgpack"]
result_accept_content = ["json", "msgpack"]
task_serializer = "json"
result_serializer = "json"

# Results expire after a day.
result_expires = 24 * 3600

# A worker that starts before its broker waits for it.
broker_connection_retry_on_startup = True
