"""A session by hand: Python's prompt, in front of a session."""

from capsule_tasks.sessions.console.console import Console

__all__ = ["Console"]
