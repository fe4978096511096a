"""Settings of the stock app: values, each with its reason. What is not here is Celery's own."""

import os

broker_url = os.environ.get("CAPSULE_BROKER_URL", os.environ.get("REDIS_URL", "redis://localhost"))
result_backend = os.environ.get("CAPSULE_RESULT_URL", broker_url)

# The pool: every task runs in a session.
worker_pool = "capsule_tasks.taskpool:TaskPool"

# The modules that hold the tasks.
imports = ("workers.pipeline",)

# A message is acknowledged when its task is over, so that a worker that dies loses nothing; and a
# child that dies takes its task's message back to the queue only if the task says that it may run
# twice (`reject_on_worker_lost`).
task_acks_late = True

# Each child has one message in hand and one waiting: with more, a long task holds up those behind
# it; with fewer, a child waits for the network between two short ones.
worker_prefetch_multiplier = 2

# A message whose worker died is delivered again after so long. Workers renew what they hold, so
# this need not be longer than a task runs; it is Celery's own default, which suits prefork workers
# beside them too.
broker_transport_options = {"visibility_timeout": 3600}

# No task runs for ever: it hears of the soft limit and may clean up, and is killed at the hard one.
task_soft_time_limit = 55 * 60
task_time_limit = 58 * 60

# Flower and `celery events` show tasks from the moment that they are sent.
worker_send_task_events = True
task_send_sent_event = True

# STARTED is told apart from PENDING by whoever waits.
task_track_started = True

# Nothing that arrives may run code when it is read: no pickle.
accept_content = ["json", "msgpack"]
result_accept_content = ["json", "msgpack"]
task_serializer = "json"
result_serializer = "json"

# Results stay for a day.
result_expires = 24 * 3600

# A worker that starts before its broker waits for it.
broker_connection_retry_on_startup = True
