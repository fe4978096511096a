"""The undocumented names of openai-agents that we use."""

from __future__ import annotations

from tests.unit.private_names.entries import names

OPENAI_AGENTS = (
    names(
        "agents.result:RunResultStreaming",
        "whether a turn is already told to be the last one",
        _cancel_mode="str",
    ),
    names(
        "agents.run_state:RunState",
        "whether a run goes on, and which agent goes on; each item of a run is serialized once",
        _current_step="NoneType",
        _current_turn="int",
        _current_agent="= starting_agent",
        _session_items="= []",
        _serialize_item="(self, item, *, agent_identity_keys_by_id=None)",
    ),
    names(
        "agents._run_state_agent_identity",
        "replaced, so that an agent is described once where it is described several times",
        _agent_identity_signature="(agent)",
    ),
    names(
        "agents.result",
        "replaced, so that items are digested only where references to them are looked for",
        rebase_nested_history_owned_item_refs="(input, run_items, owned_item_refs)",
    ),
    names("agents.handoffs:Handoff", "the agent that a handoff leads to", _agent_ref="NoneType"),
    names(
        "agents.tool:FunctionTool",
        "agents as tools have no entry in the ledger; their agents are prepared, too",
        _is_agent_tool="bool",
        _agent_instance="NoneType",
    ),
    names(
        "agents.tool",
        "tools are wrapped so that approvals still know what `@function_tool` made",
        _FailureHandlingFunctionToolInvoker="class",
        _get_function_tool_invoke_context="(function_tool, context)",
    ),
    names(
        "agents.tool:_FailureHandlingFunctionToolInvoker",
        "overridden by our invoker",
        __agents_bind_function_tool__="(self, function_tool)",
        __call__="(self, ctx, input)",
        _function_tool="= function_tool",
    ),
    names(
        "agents._tool_identity",
        "the identity of a tool, as approvals have it",
        get_function_tool_lookup_key_for_tool="(tool)",
        serialize_function_tool_lookup_key="(lookup_key)",
    ),
    names(
        "agents.models.interface:Model",
        "passed on to the model that is journaled",
        _cleanup_on_run_end="(self, owner)",
    ),
    names(
        "agents.run_internal.tool_actions:ApplyPatchAction",
        "replaced, so that an editor knows which call it works for",
        execute="(… agent, call)",
    ),
    names(
        "agents.run_internal.tool_actions:ComputerAction",
        "replaced, so that actions of computers go through the ledger",
        _execute_action_and_capture="(cls, computer, tool_call)",
    ),
)
