"""What users' own tests need: the same contracts, without a server."""

from capsule_tasks.testing.memory_store import MemoryStore

__all__ = ["MemoryStore"]
