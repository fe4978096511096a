"""Runs of agents that can stop and go on anywhere: their state, and what it means.

A `RunState` says all that is needed to go on with a run: who is speaking, which tool calls wait for
a decision, which decisions were taken. It holds no agent and no tool, only their identities, and
no item that the history already has, only how many of them there are. It is plain data: storing it,
claiming it and committing it is the part of `capsule_tasks.storage`.
"""

from capsule_tasks.runs.approvals import Decision, PendingCall, RunApprovals
from capsule_tasks.runs.contexts import SavedContext, restored_context, saved_context
from capsule_tasks.runs.identity import AgentGraph, AgentId, ToolKey
from capsule_tasks.runs.schema import (
    CURRENT_SCHEMA_VERSION,
    SCHEMA_VERSION_SUMMARIES,
    SUPPORTED_SCHEMA_VERSIONS,
)
from capsule_tasks.runs.state import RunState, ServerConversation, TraceState, Usage

__all__ = [
    "CURRENT_SCHEMA_VERSION",
    "SCHEMA_VERSION_SUMMARIES",
    "SUPPORTED_SCHEMA_VERSIONS",
    "AgentGraph",
    "AgentId",
    "Decision",
    "PendingCall",
    "RunApprovals",
    "RunState",
    "SavedContext",
    "ServerConversation",
    "ToolKey",
    "TraceState",
    "Usage",
    "restored_context",
    "saved_context",
]
