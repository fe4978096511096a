"""Makes models of names."""

from __future__ import annotations

from functools import cache

from capsule_tasks.errors import InvalidSetting
from capsule_tasks.runs.models.model import Model
from capsule_tasks.runs.models.openai_chat import OpenAIChat
from capsule_tasks.runs.models.openai_client import OpenAIClients
from capsule_tasks.runs.models.openai_responses import OpenAIResponses

_CHAT = "chat/"


class OpenAIModels(OpenAIClients):
    """The models of one server by their names, over one client for each event loop.

    `gpt-5` speaks the Responses API, `chat/gpt-5` Chat Completions.
    """

    def __call__(self, name: str) -> Model:
        own_name = name.removeprefix(_CHAT)
        if not own_name:
            must = "the name of a model, such as 'gpt-5' or 'chat/gpt-5'"
            raise InvalidSetting("the name of the model", name, must)
        kind = OpenAIChat if name.startswith(_CHAT) else OpenAIResponses
        return kind(own_name, clients=self)


@cache
def default_models() -> OpenAIModels:
    """The models of this process for runs without a model provider."""
    return OpenAIModels()


def default_model(name: str) -> Model:
    """The model of this name, for a run without a model provider."""
    return default_models()(name)
