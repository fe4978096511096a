"""Settings of a run that hold for all of its agents."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from capsule_tasks.runs.agents.agent import Agent
from capsule_tasks.runs.agents.checking import check, check_fields
from capsule_tasks.runs.agents.contexts import RunContext
from capsule_tasks.runs.agents.guardrails import InputGuardrail, OutputGuardrail
from capsule_tasks.runs.agents.handoffs import HandoffFilter
from capsule_tasks.runs.compaction import Compaction
from capsule_tasks.runs.models.model import Model, ModelSettings
from capsule_tasks.runs.preparing import SessionInputCallback
from capsule_tasks.runs.records import Item


@dataclass(frozen=True)
class ModelInput:
    """The next question to a model; a filter returns another one, and changes none."""

    items: list[Item]
    instructions: str | None = None


InputFilter = Callable[[RunContext, Agent, ModelInput], ModelInput | Awaitable[ModelInput]]


@dataclass(kw_only=True, frozen=True, eq=False)
class RunConfig:
    """Settings of a run that hold for all of its agents."""

    model: Model | str | None = None
    """In place of the model of every agent."""
    model_settings: ModelSettings | None = None
    """Over those of every agent."""
    model_provider: Callable[[str], Model] | None = None
    """Makes a model of a name; None for the models of OpenAI."""
    session_input_callback: SessionInputCallback | None = None
    """Makes the model's input of the history's items and of the new ones."""
    input_filter: InputFilter | None = None
    """Narrows the model's view before each call. The history keeps everything."""
    handoff_input_filter: HandoffFilter | None = None
    """For handoffs without an `input_filter` of their own."""
    input_guardrails: list[InputGuardrail] = field(default_factory=list)
    """Run with those of the first agent."""
    output_guardrails: list[OutputGuardrail] = field(default_factory=list)
    """Run with those of the last agent."""
    compaction: Compaction | None = None
    """When and how the history is compacted."""
    auto_previous_response_id: bool = False
    """Let the server keep the conversation of this run, each call naming the reply before it."""

    def __post_init__(self) -> None:
        check_fields(RunConfig, self)
        has_one_owner = self.compaction is None or not self.auto_previous_response_id
        must = "None beside auto_previous_response_id: a server compacts what it keeps"
        check("RunConfig.compaction", self.compaction, has_one_owner, must)
