"""Executions in a worker: their lifecycle, the children that run them, what Redis is told of them.

Celery is unknown here: a code execution or an agent run has the same life as a task.
"""
