"""The parent's side of sessions. A `Session` owns one child and is its only reader."""

from capsule_tasks.sessions.info import SessionInfo
from capsule_tasks.sessions.pool.session_pool import SessionPool
from capsule_tasks.sessions.session import Completed, Session
from capsule_tasks.sessions.states import SessionState
from capsule_tasks.settings import SessionConfig

__all__ = ["Completed", "Session", "SessionConfig", "SessionInfo", "SessionPool", "SessionState"]
