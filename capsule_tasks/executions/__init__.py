"""Executions in a worker: their lifecycle, the children that run them, and their streams in Redis.

Celery is unknown here: a code execution or an agent run has the same life as a task.
"""
