"""What users' own tests need: a Redis server of their own, and tasks that run without a worker."""

from capsule_tasks.testing.eager import eager
from capsule_tasks.testing.servers import PrivateServer

__all__ = ["PrivateServer", "eager"]
