"""What users' own tests need: the same contracts, without a server or a worker."""

from capsule_tasks.testing.eager import eager
from capsule_tasks.testing.memory_store import MemoryStore

__all__ = ["MemoryStore", "eager"]
