"""The app that a deployment starts: `celery -A workers worker`."""

from workers.app import app

__all__ = ["app"]
