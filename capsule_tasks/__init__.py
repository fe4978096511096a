"""Celery tasks and code executions that run in warm, isolated subprocess sessions.

Public names are loaded when they are first asked for (PEP 562): a session's child imports this
package at every start and must not pay for the parent's side.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from capsule_tasks.child.io.capture import progress
    from capsule_tasks.client import Capsule, Execution, GroupExecution, step
    from capsule_tasks.client.tools import code_tool, task_tool
    from capsule_tasks.errors import EffectUncertain, ExecutionCancelled
    from capsule_tasks.realtime import (
        OpenAIRealtime,
        RealtimeConfig,
        RealtimeModelConfig,
        RealtimeRunner,
        RealtimeSession,
        RealtimeSettings,
    )
    from capsule_tasks.runs import (
        Agent,
        Handoff,
        RunConfig,
        RunContext,
        Runner,
        RunResult,
        RunStream,
        ToolContext,
        ToolVerdict,
        Verdict,
        function_tool,
        input_guardrail,
        output_guardrail,
        tool_input_guardrail,
        tool_output_guardrail,
    )
    from capsule_tasks.runs.models import ModelSettings
    from capsule_tasks.sessions import Session, SessionConfig, SessionPool
    from capsule_tasks.settings import (
        ChildSettings,
        LimitSettings,
        PoolSettings,
        Profile,
        SandboxSettings,
    )
    from capsule_tasks.storage import History, SyncHistory

__version__ = "0.1.0.dev0"

__all__ = [
    "Agent",
    "Capsule",
    "ChildSettings",
    "EffectUncertain",
    "Execution",
    "ExecutionCancelled",
    "GroupExecution",
    "Handoff",
    "History",
    "LimitSettings",
    "ModelSettings",
    "OpenAIRealtime",
    "PoolSettings",
    "Profile",
    "RealtimeConfig",
    "RealtimeModelConfig",
    "RealtimeRunner",
    "RealtimeSession",
    "RealtimeSettings",
    "RunConfig",
    "RunContext",
    "RunResult",
    "RunStream",
    "Runner",
    "SandboxSettings",
    "Session",
    "SessionConfig",
    "SessionPool",
    "SyncHistory",
    "ToolContext",
    "ToolVerdict",
    "Verdict",
    "__version__",
    "code_tool",
    "function_tool",
    "input_guardrail",
    "output_guardrail",
    "progress",
    "step",
    "task_tool",
    "tool_input_guardrail",
    "tool_output_guardrail",
]

_NAMES_IN = {
    "capsule_tasks.child.io.capture": ("progress",),
    "capsule_tasks.client": ("Capsule", "Execution", "GroupExecution", "step"),
    "capsule_tasks.client.tools": ("code_tool", "task_tool"),
    "capsule_tasks.errors": ("EffectUncertain", "ExecutionCancelled"),
    "capsule_tasks.realtime": (
        "OpenAIRealtime",
        "RealtimeConfig",
        "RealtimeModelConfig",
        "RealtimeRunner",
        "RealtimeSession",
        "RealtimeSettings",
    ),
    "capsule_tasks.runs": (
        "Agent",
        "Handoff",
        "RunConfig",
        "RunContext",
        "RunResult",
        "RunStream",
        "Runner",
        "ToolContext",
        "ToolVerdict",
        "Verdict",
        "function_tool",
        "input_guardrail",
        "output_guardrail",
        "tool_input_guardrail",
        "tool_output_guardrail",
    ),
    "capsule_tasks.runs.models": ("ModelSettings",),
    "capsule_tasks.sessions": ("Session", "SessionConfig", "SessionPool"),
    "capsule_tasks.settings": (
        "ChildSettings",
        "LimitSettings",
        "PoolSettings",
        "Profile",
        "SandboxSettings",
    ),
    "capsule_tasks.storage": ("History", "SyncHistory"),
}
_HOME_OF = {name: home for home, names in _NAMES_IN.items() for name in names}


def __getattr__(name: str) -> object:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(globals().keys() | set(__all__))
