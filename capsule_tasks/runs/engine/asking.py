"""Asks the model of a turn."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import msgspec

from capsule_tasks.errors import CallbackFailed, InvalidSetting, ModelFailed, ModelMisbehaved
from capsule_tasks.protocol.values import sendable
from capsule_tasks.runs.agents.agent import Agent
from capsule_tasks.runs.agents.contexts import RunContext
from capsule_tasks.runs.agents.run_config import ModelInput, RunConfig
from capsule_tasks.runs.conversation import Conversation
from capsule_tasks.runs.engine.deciding import settings_for
from capsule_tasks.runs.engine.ports import TurnPorts
from capsule_tasks.runs.engine.setup import Abilities, RunSetup, called_back, listed
from capsule_tasks.runs.items import RunningDigest, items_of_reply
from capsule_tasks.runs.models.calling import call_model
from capsule_tasks.runs.models.model import (
    Model,
    ModelDelta,
    ModelReply,
    ModelRequest,
    ModelSettings,
)
from capsule_tasks.runs.models.provider import default_model
from capsule_tasks.runs.state import RunState

_encode = msgspec.json.Encoder(order="sorted").encode


async def asked(
    run: RunSetup, state: RunState, conversation: Conversation, able: Abilities, ports: TurnPorts
) -> ModelReply:
    """The reply to the conversation. Raises ModelFailed, ModelMisbehaved and CallbackFailed."""
    agent = able.agent
    request, question = await _request(run, state, conversation, able)
    model = model_of(run.config, agent)

    def show(delta: ModelDelta) -> None:
        ports.publish(f"{delta.kind}_delta", agent.name, _data(delta))

    def discard(failure: ModelFailed) -> None:
        ports.publish("attempt_discarded", agent.name, {"why": str(failure)})

    async def make() -> ModelReply:
        if not ports.is_watched:
            return _readable(await call_model(model, request))
        return _readable(await call_model(model, request, on_delta=show, on_discarded=discard))

    return await ports.ask(run.path, question, make, is_held=not run.path)


def _readable(reply: ModelReply) -> ModelReply:
    """The reply, whose items can be stored. Raises ModelMisbehaved for what is no item."""
    try:
        items = items_of_reply(reply.items)
    except InvalidSetting as error:
        raise ModelMisbehaved(str(error)) from None
    return reply if items is reply.items else msgspec.structs.replace(reply, items=items)


async def instructions_of(agent: Agent, context: RunContext) -> str | None:
    """The instructions of an agent now; a function of them is asked each time."""
    instructions: Any = agent.instructions
    if callable(instructions):
        instructions = await called_back("instructions", agent, instructions, context, agent)
        if not isinstance(instructions, str | None):
            raise CallbackFailed("instructions", agent.name, f"it returned {instructions!r:.100}")
    return instructions if instructions is None else sendable(instructions)


async def _request(
    run: RunSetup, state: RunState, conversation: Conversation, able: Abilities
) -> tuple[ModelRequest, str]:
    """The request, and its digest. The digest costs what the new items cost."""
    agent, config = able.agent, run.config
    instructions = await instructions_of(agent, run.context)
    items, seen = conversation.view, conversation.digest
    if config.input_filter is not None:
        given = ModelInput(items, instructions)
        found = await called_back(
            "input_filter", agent, config.input_filter, run.context, agent, given
        )
        if not isinstance(found, ModelInput):
            raise CallbackFailed("input_filter", agent.name, f"it returned {found!r:.100}")
        items, instructions = listed("input_filter", agent, found.items), found.instructions
        seen = RunningDigest(items).hexdigest()
    settings = settings_for(state, agent, _settings(config, agent))
    server = conversation.server
    request = ModelRequest(
        input=items,
        instructions=instructions,
        tools=able.specs,
        output_schema=able.output_type.schema,
        settings=settings,
        conversation_id=server.conversation_id if server else None,
        previous_response_id=server.previous_response_id if server else None,
    )
    digest = sha256(able.digest)
    digest.update(_encode([seen, instructions, settings, server]))
    return request, digest.hexdigest()[:32]


def storing_model_of(config: RunConfig, agent: Agent) -> Model | None:
    """The model of an agent, if its server stores the replies."""
    settings = _settings(config, agent)
    return None if settings.store is False else model_of(config, agent)


def _settings(config: RunConfig, agent: Agent) -> ModelSettings:
    settings = agent.model_settings
    return settings if config.model_settings is None else config.model_settings.over(settings)


def model_of(config: RunConfig, agent: Agent) -> Model:
    model = agent.model if config.model is None else config.model
    if isinstance(model, str):
        return (config.model_provider or default_model)(model)
    if model is None:
        raise InvalidSetting(f"the model of agent {agent.name!r}", model, "a model, or its name")
    return model


def _data(delta: ModelDelta) -> dict[str, str]:
    if delta.call_id is None:
        return {"text": delta.text}
    return {"text": delta.text, "call_id": delta.call_id}
