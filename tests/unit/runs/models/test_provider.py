"""Names of models."""

from __future__ import annotations

import pytest

from capsule_tasks.errors import InvalidSetting
from capsule_tasks.runs.models.openai_chat import OpenAIChat
from capsule_tasks.runs.models.openai_responses import OpenAIResponses
from capsule_tasks.runs.models.provider import OpenAIModels


@pytest.mark.parametrize(
    ("name", "kind", "own_name"),
    [
        ("gpt-5", OpenAIResponses, "gpt-5"),
        ("chat/gpt-5", OpenAIChat, "gpt-5"),
        ("chat/meta/llama", OpenAIChat, "meta/llama"),
        ("meta/llama", OpenAIResponses, "meta/llama"),
    ],
)
def test_a_name_says_which_api_the_model_speaks(name: str, kind: type, own_name: str) -> None:
    model = OpenAIModels()(name)
    assert type(model) is kind
    assert repr(model) == f"{kind.__name__}({own_name!r})"


@pytest.mark.parametrize("name", ["", "chat/"])
def test_a_name_may_not_be_empty(name: str) -> None:
    with pytest.raises(InvalidSetting, match="name of a model, such as 'gpt-5'"):
        OpenAIModels()(name)
