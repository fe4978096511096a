"""Runner: runs of agents in this process."""

from __future__ import annotations

import asyncio
from typing import Any

from capsule_tasks.errors import LoopIsRunning
from capsule_tasks.runs.agents.agent import Agent
from capsule_tasks.runs.agents.run_config import RunConfig
from capsule_tasks.runs.engine.in_process import InProcessRun, RunArguments, Session
from capsule_tasks.runs.engine.results import RunResult, RunStream
from capsule_tasks.runs.records import Item
from capsule_tasks.runs.state import RunState

Given = str | list[Item] | RunState


class Runner:
    """Runs agents in this process. `capsule.runs` runs the same agents durably.

    The input is a text, a list of items, or the state of a run that goes on. Each completed turn
    is saved in the `session`, in one step, before the next one begins. A run whose conversation is
    kept by the model's server has its id instead: `conversation_id`, `previous_response_id`, or
    `RunConfig.auto_previous_response_id`.

    A run that fails raises a `RunStopped`, as MaxTurnsExceeded, GuardrailTripped or ModelFailed
    are. The error has `state`, to go on from; `items`; and `rewind()`, to take back what was
    stored.
    """

    @staticmethod
    async def run(
        agent: Agent,
        given: Given,
        *,
        session: Session | None = None,
        context: Any = None,
        max_turns: int | None = None,
        run_config: RunConfig | None = None,
        conversation_id: str | None = None,
        previous_response_id: str | None = None,
    ) -> RunResult:
        """Run an agent until it has a final output, or waits for a decision about a tool call."""
        arguments = RunArguments(
            agent=agent,
            given=given,
            session=session,
            context=context,
            max_turns=max_turns,
            config=run_config or RunConfig(),
            conversation_id=conversation_id,
            previous_response_id=previous_response_id,
        )
        run = InProcessRun(arguments)
        await run.drive()
        return RunResult(run)

    @staticmethod
    def run_sync(agent: Agent, given: Given, **options: Any) -> RunResult:
        """As `run`, for callers that block; the session may be a `SyncHistory`, too."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(Runner.run(agent, given, **options))
        raise LoopIsRunning("Runner.run_sync", "await Runner.run")

    @staticmethod
    def run_streamed(agent: Agent, given: Given, **options: Any) -> RunStream:
        """Start a run as `run` does, in a task of its own, and watch its events."""
        config = options.pop("run_config", None) or RunConfig()
        return RunStream(RunArguments(agent=agent, given=given, config=config, **options))
