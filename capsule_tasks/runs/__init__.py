"""Runs of agents that can stop and be continued anywhere: their state, and what it means.

A `RunState` has all that is needed to continue a run: whose turn is next, which tool calls wait for
a decision, which decisions were taken. It contains the identities of agents and tools, not agents
and tools, and the number of items in the history, not the items. It is plain data;
`capsule_tasks.storage` stores, claims and commits it.

What authors declare, as agents and tools, is loaded when it is first asked for (PEP 562): those
who only store and read states do not pay for them.
"""

from importlib import import_module
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from capsule_tasks.runs.agents.agent import Agent, ToolResult
    from capsule_tasks.runs.agents.contexts import RunContext, ToolContext
    from capsule_tasks.runs.agents.functions import function_tool
    from capsule_tasks.runs.agents.guardrails import (
        InputGuardrail,
        OutputGuardrail,
        ToolGuardrail,
        ToolVerdict,
        Verdict,
        input_guardrail,
        output_guardrail,
        tool_input_guardrail,
        tool_output_guardrail,
    )
    from capsule_tasks.runs.agents.handoffs import Handoff, HandoffInput, only_last, without_tools
    from capsule_tasks.runs.agents.outputs import OutputType
    from capsule_tasks.runs.agents.run_config import ModelInput, RunConfig
    from capsule_tasks.runs.agents.tools import AgentTool, HostedTool, Tool
    from capsule_tasks.runs.compaction import (
        Compaction,
        ResponsesCompactor,
        SummaryCompactor,
        compact,
        compact_sync,
    )
    from capsule_tasks.runs.engine.events import StreamEvent
    from capsule_tasks.runs.engine.results import RunResult, RunStream
    from capsule_tasks.runs.engine.runner import Runner
    from capsule_tasks.runs.models.model import (
        Model,
        ModelDelta,
        ModelReply,
        ModelRequest,
        ModelRetries,
        ModelSettings,
    )
    from capsule_tasks.runs.models.openai_chat import OpenAIChat
    from capsule_tasks.runs.models.openai_responses import OpenAIResponses
    from capsule_tasks.runs.preparing import prepare_input_with_session

__all__ = [
    "CURRENT_SCHEMA_VERSION",
    "SCHEMA_VERSION_SUMMARIES",
    "SUPPORTED_SCHEMA_VERSIONS",
    "Agent",
    "AgentGraph",
    "AgentId",
    "AgentTool",
    "CodeSession",
    "Compaction",
    "Decision",
    "FilteredInput",
    "GuardrailResult",
    "Handoff",
    "HandoffInput",
    "HostedTool",
    "InputGuardrail",
    "Model",
    "ModelDelta",
    "ModelInput",
    "ModelReply",
    "ModelRequest",
    "ModelResponse",
    "ModelRetries",
    "ModelSettings",
    "OpenAIChat",
    "OpenAIResponses",
    "OutputGuardrail",
    "OutputType",
    "PendingCall",
    "ResponsesCompactor",
    "RunApprovals",
    "RunConfig",
    "RunContext",
    "RunResult",
    "RunState",
    "RunStream",
    "Runner",
    "SavedContext",
    "ServerConversation",
    "Spent",
    "StreamEvent",
    "SummaryCompactor",
    "Tool",
    "ToolContext",
    "ToolGuardrail",
    "ToolKey",
    "ToolResult",
    "ToolVerdict",
    "TraceState",
    "Usage",
    "Verdict",
    "compact",
    "compact_sync",
    "function_tool",
    "input_guardrail",
    "only_last",
    "output_guardrail",
    "prepare_input_with_session",
    "restored_context",
    "saved_context",
    "tool_input_guardrail",
    "tool_output_guardrail",
    "without_tools",
]

_LOADED_LATER = (
    *("models.model", "models.openai_chat", "models.openai_responses", "preparing"),
    *("agents.contexts", "agents.guardrails", "agents.functions", "agents.handoffs"),
    *("agents.outputs", "agents.agent", "agents.tools", "compaction", "agents.run_config"),
    *("engine.events", "engine.results", "engine.runner"),
)


def __getattr__(name: str) -> object:
    for module in _LOADED_LATER if name in __all__ else ():
        home = import_module(f"{__name__}.{module}")
        if hasattr(home, name):
            return globals().setdefault(name, getattr(home, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
