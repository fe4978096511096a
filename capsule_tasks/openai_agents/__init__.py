"""Agents of openai-agents as durable runs: the agent as it is, one turn at a time.

Needs the extra `openai-agents`. `OpenAIEngine` prepares an agent once: its models and its tools,
and those of all agents that it can reach, ask the journal and the ledger of the run that they work
for. Outside of a durable run they do what they did before.
"""

from capsule_tasks.openai_agents.engine import OpenAIEngine

__all__ = ["OpenAIEngine"]
