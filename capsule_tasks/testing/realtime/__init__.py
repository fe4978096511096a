"""A local server of OpenAI's Realtime protocol, which answers as a test has scripted."""

from capsule_tasks.testing.realtime.connection import RealtimeConnection
from capsule_tasks.testing.realtime.script import Answer, Hold, fails, speaks, writes
from capsule_tasks.testing.realtime.server import RealtimeServer

__all__ = ["Answer", "Hold", "RealtimeConnection", "RealtimeServer", "fails", "speaks", "writes"]
