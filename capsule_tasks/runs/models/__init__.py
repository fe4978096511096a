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

__all__ = [
    "Model",
    "ModelDelta",
    "ModelReply",
    "ModelRequest",
    "ModelRetries",
    "ModelSettings",
    "OutputSchema",
    "ToolSpec",
    "call_model",
]
