"""Makes models of names."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from capsule_tasks.errors import InvalidSetting
from capsule_tasks.runs.models.model import Model
from capsule_tasks.runs.models.openai_chat import OpenAIChat
from capsule_tasks.runs.models.openai_client import OpenAIClients
from capsule_tasks.runs.models.openai_responses import OpenAIResponses

if TYPE_CHECKING:
    from openai import AsyncOpenAI

_CHAT = "chat/"


class OpenAIModels:
    """The models of one server by their names, over one client for each event loop.

    `gpt-5` speaks the Responses API, `chat/gpt-5` Chat Completions.
    """

    def __init__(
        self,
        client: AsyncOpenAI | None = None,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
    ) -> None:
        """Without arguments the client reads OPENAI_API_KEY and OPENAI_BASE_URL."""
        self._clients = OpenAIClients(client, base_url=base_url, api_key=api_key)
        self._models: dict[str, Model] = {}

    def __call__(self, name: str) -> Model:
        if name not in self._models:
            own_name = name.removeprefix(_CHAT)
            if not own_name:
                must = "the name of a model, such as 'gpt-5' or 'chat/gpt-5'"
                raise InvalidSetting("the name of the model", name, must)
            kind = OpenAIChat if name.startswith(_CHAT) else OpenAIResponses
            self._models[name] = kind(own_name, clients=self._clients)
        return self._models[name]

    async def aclose(self) -> None:
        """Close the client that was made for the running event loop; one that was given stays."""
        await self._clients.aclose()


@cache
def default_models() -> OpenAIModels:
    """The models of this process for runs without a model provider."""
    return OpenAIModels()


def default_model(name: str) -> Model:
    """The model of this name, for a run without a model provider."""
    return default_models()(name)
