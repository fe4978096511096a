"""Models: the port, and the models of OpenAI-compatible servers."""

from capsule_tasks.runs.models.calling import call_model
from capsule_tasks.runs.models.model import (
    Model,
    ModelDelta,
    ModelReply,
    ModelRequest,
    ModelRetries,
    ModelSettings,
    OutputSchema,
    ToolSpec,
)
from capsule_tasks.runs.models.openai_chat import OpenAIChat
from capsule_tasks.runs.models.openai_responses import OpenAIResponses
from capsule_tasks.runs.models.provider import OpenAIModels, default_model, default_models

__all__ = [
    "Model",
    "ModelDelta",
    "ModelReply",
    "ModelRequest",
    "ModelRetries",
    "ModelSettings",
    "OpenAIChat",
    "OpenAIModels",
    "OpenAIResponses",
    "OutputSchema",
    "ToolSpec",
    "call_model",
    "default_model",
    "default_models",
]
