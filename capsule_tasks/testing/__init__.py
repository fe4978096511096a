"""For the tests of applications that use capsule_tasks."""

from capsule_tasks.testing.eager import eager

__all__ = ["eager"]
