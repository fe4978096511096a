"""Agents as their authors declare them: instructions, tools, handoffs and guardrails."""
