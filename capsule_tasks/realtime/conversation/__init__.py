"""The conversation of a realtime session: its items as they are now, and how they are stored."""

from capsule_tasks.realtime.conversation.log import ConversationLog
from capsule_tasks.realtime.conversation.saving import HistoryWriter

__all__ = ["ConversationLog", "HistoryWriter"]
