"""RealtimeRunner: makes realtime sessions of an agent."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from capsule_tasks.realtime.model import RealtimeModel
from capsule_tasks.realtime.session.session import RealtimeSession
from capsule_tasks.realtime.settings import RealtimeConfig, RealtimeModelConfig
from capsule_tasks.runs.agents.agent import Agent
from capsule_tasks.runs.agents.checking import check
from capsule_tasks.runs.state import RunState


class RealtimeRunner:
    """Makes sessions in which an agent talks over one connection to a realtime model.

    The agent is the same as those of `Runner`. Without a model each session has an
    `OpenAIRealtime` of its own. A model that is given serves one session at a time; a function that
    makes models serves any number of sessions.
    """

    def __init__(
        self,
        agent: Agent,
        model: RealtimeModel | Callable[[], RealtimeModel] | None = None,
        config: RealtimeConfig | None = None,
    ) -> None:
        check("agent", agent, isinstance(agent, Agent), "an Agent")
        is_config = config is None or isinstance(config, RealtimeConfig)
        check("config", config, is_config, "a RealtimeConfig")
        self._agent = agent
        self._make_model = _maker_of(model)
        self._config = config or RealtimeConfig()

    def run(
        self,
        context: Any = None,
        model_config: RealtimeModelConfig | None = None,
        *,
        history: Any | None = None,
        state: RunState | None = None,
    ) -> RealtimeSession:
        """A session, which `async with` opens and closes. Nothing is done before that.

        `context` is the object that tools and callbacks are given. The model is told what is in the
        `history`, a History or a SyncHistory, which gets the items of the session. With a `state`
        the session goes on with the calls and decisions of another session, or of a run.
        """
        is_config = model_config is None or isinstance(model_config, RealtimeModelConfig)
        check("model_config", model_config, is_config, "a RealtimeModelConfig")
        methods = (getattr(history, name, None) for name in ("get_items", "add_items"))
        is_history = history is None or all(map(callable, methods))
        check("history", history, is_history, "a History or a SyncHistory")
        check("state", state, state is None or isinstance(state, RunState), "a RunState")
        return RealtimeSession(
            self._agent,
            self._make_model,
            self._config,
            model_config or RealtimeModelConfig(),
            context,
            history,
            state,
        )


def _maker_of(model: Any) -> Callable[[], RealtimeModel]:
    if model is None:
        # Those who have a model of their own do not pay for this one.
        from capsule_tasks.realtime.openai.websocket import OpenAIRealtime  # noqa: PLC0415

        return OpenAIRealtime
    if isinstance(model, RealtimeModel) and not isinstance(model, type):
        return lambda: model
    must = "a RealtimeModel, or a function, not an async one, that makes one for each session"
    check("model", model, callable(model) and not inspect.iscoroutinefunction(model), must)

    def make() -> RealtimeModel:
        made: RealtimeModel = model()
        is_model = isinstance(made, RealtimeModel)
        check("what the function model makes", made, is_model, "a RealtimeModel")
        return made

    return make
