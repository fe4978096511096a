"""A guardrail for tests of realtime sessions: it notes what it is asked, and may be held."""

from __future__ import annotations

import asyncio
from typing import Any

from capsule_tasks.runs.agents.agent import Agent
from capsule_tasks.runs.agents.guardrails import InputGuardrail, OutputGuardrail, Verdict


class Guardrail:
    """A guardrail that notes what it is asked, and trips on texts that have a word in them."""

    def __init__(self, name: str = "no_secrets", word: str = "secret") -> None:
        self.name = name
        self.word = word
        self.asked: list[tuple[str, str]] = []
        self._is_asked = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def check(self, _run: Any, agent: Agent, text: Any) -> Verdict:
        self.asked.append((agent.name, text))
        self._is_asked.set()
        await self.may_answer.wait()
        return Verdict(self.word in text, {"about": agent.name})

    async def was_asked(self, times: int = 1) -> None:
        """Wait until it was asked so often."""
        while len(self.asked) < times:
            self._is_asked.clear()
            await asyncio.wait_for(self._is_asked.wait(), 5)

    @property
    def texts(self) -> list[str]:
        return [text for _, text in self.asked]

    def held(self) -> Guardrail:
        self.may_answer.clear()
        return self

    def of_output(self) -> OutputGuardrail:
        return OutputGuardrail(self.check, self.name)

    def of_input(self, parallel: bool = True) -> InputGuardrail:
        return InputGuardrail(self.check, self.name, parallel)
