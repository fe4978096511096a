"""An agent whose model is behind HTTP, and engines with the official client."""

from __future__ import annotations

from typing import Any

from agents import Agent, OpenAIProvider, RunConfig, function_tool
from openai import AsyncOpenAI

from capsule_tasks.openai_agents import OpenAIEngine
from tests.agents_script import calls
from tests.integration.durable_agents import look
from tests.integration.responses_server import MODEL, ResponsesServer

PAY = calls("pay", '{"euros": 5}', "c_pay")


@function_tool(needs_approval=True)
async def pay(euros: int) -> str:
    return f"paid {euros}"


def cashier(**options: Any) -> Agent[Any]:
    """An agent that asks for its model by name."""
    return Agent(name="cashier", instructions="Pay.", model=MODEL, tools=[look, pay], **options)


class Clients:
    """Engines whose models are behind a server; their clients are closed at the end of the test."""

    def __init__(self) -> None:
        self._clients: list[AsyncOpenAI] = []

    def of(self, server: ResponsesServer, **options: Any) -> AsyncOpenAI:
        client = server.client(**options)
        self._clients.append(client)
        return client

    def engine(
        self, server: ResponsesServer, agent: Agent[Any] | None = None, **options: Any
    ) -> OpenAIEngine:
        provider = OpenAIProvider(openai_client=self.of(server, **options))
        return OpenAIEngine(agent or cashier(), run_config=RunConfig(model_provider=provider))

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
