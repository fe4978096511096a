"""Run code and Celery tasks in the main thread of a child, and report how they end."""
