"""Runs of agents that can stop and be continued anywhere: their state, and what it means.

A `RunState` has all that is needed to continue a run: whose turn is next, which tool calls wait for
a decision, which decisions were taken. It contains the identities of agents and tools, not agents
and tools, and the number of items in the history, not the items. It is plain data;
`capsule_tasks.storage` stores, claims and commits it.
"""

from capsule_tasks.runs.approvals import Decision, PendingCall, RunApprovals
from capsule_tasks.runs.contexts import SavedContext, restored_context, saved_context
from capsule_tasks.runs.identity import AgentGraph, AgentId, ToolKey
from capsule_tasks.runs.records import (
    CodeSession,
    FilteredInput,
    GuardrailResult,
    ModelResponse,
    Spent,
    Usage,
)
from capsule_tasks.runs.schema import (
    CURRENT_SCHEMA_VERSION,
    SCHEMA_VERSION_SUMMARIES,
    SUPPORTED_SCHEMA_VERSIONS,
)
from capsule_tasks.runs.state import RunState, ServerConversation, TraceState

__all__ = [
    "CURRENT_SCHEMA_VERSION",
    "SCHEMA_VERSION_SUMMARIES",
    "SUPPORTED_SCHEMA_VERSIONS",
    "AgentGraph",
    "AgentId",
    "CodeSession",
    "Decision",
    "FilteredInput",
    "GuardrailResult",
    "ModelResponse",
    "PendingCall",
    "RunApprovals",
    "RunState",
    "SavedContext",
    "ServerConversation",
    "Spent",
    "ToolKey",
    "TraceState",
    "Usage",
    "restored_context",
    "saved_context",
]
