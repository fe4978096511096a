"""Helpers for the tests of an app: a private Redis server, and tasks that run without a worker."""

from capsule_tasks.testing.eager import eager
from capsule_tasks.testing.servers import PrivateServer

__all__ = ["PrivateServer", "eager"]
