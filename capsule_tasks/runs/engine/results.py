"""The results of runs in process, and runs that are watched while they go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Literal

from capsule_tasks.errors import RunCancelled
from capsule_tasks.runs.agents.agent import Agent
from capsule_tasks.runs.approvals import PendingCall
from capsule_tasks.runs.engine.events import EventBuffer, StreamEvent
from capsule_tasks.runs.engine.in_process import InProcessRun, RunArguments
from capsule_tasks.runs.records import GuardrailResult, Item, Spent
from capsule_tasks.runs.state import RunState
from capsule_tasks.storage.history.types import PoppedSuffix


class RunResult:
    """The result of a run, so far or in the end."""

    def __init__(self, run: InProcessRun) -> None:
        self._run = run

    @property
    def final_output(self) -> Any:
        """The output, of the last agent's `output_type`; None if the run waits or was stopped."""
        return self._run.final_output

    @property
    def items(self) -> list[Item]:
        """The items that this call of the run has made, all of them stored if it has a session."""
        return self._run.items

    @property
    def state(self) -> RunState:
        """The state after the last completed turn, to decide on calls and to go on from."""
        return self._run.whole_state()

    @property
    def interruptions(self) -> list[PendingCall]:
        """The calls that wait for a decision."""
        return self._run.state.unresolved()

    @property
    def agent(self) -> Agent:
        """The agent whose turn would be next."""
        return self._run.book.agent(self._run.state.agent)

    @property
    def usage(self) -> Spent:
        """The usage of all turns of the run; `state.usage` has that of each agent."""
        return self._run.state.total_usage()

    @property
    def guardrails(self) -> tuple[GuardrailResult, ...]:
        """The findings of the guardrails of inputs and outputs."""
        return self._run.state.guardrails

    async def rewind(self) -> PoppedSuffix:
        """Remove exactly what this call of the run has stored from its history, or nothing.

        The answer says which: nothing is removed once others have appended. Until a rewind that
        raised an error was made again, no run is started with that session.
        """
        return await self._run.rewind()


class RunStream(RunResult):
    """A run that is under way in a task of its own, with its events.

    The run does not wait for those who read its events, and goes on if they leave.
    """

    def __init__(self, arguments: RunArguments) -> None:
        self._events = EventBuffer()
        super().__init__(InProcessRun(arguments, self._events.put))
        self._task = asyncio.create_task(self._run.drive())
        _running.add(self._task)
        # A task that is cancelled before it has begun runs none of its code.
        self._task.add_done_callback(self._ended)

    @property
    def is_over(self) -> bool:
        return self._task.done()

    async def events(self) -> AsyncIterator[StreamEvent]:
        """The events, each of them once; at the end the error of a run that failed is raised.

        A run that was cancelled just ends.
        """
        async for event in self._events.read():
            yield event
        await asyncio.wait({self._task})
        if not self._task.cancelled():
            self._task.result()

    async def result(self) -> RunResult:
        """The result once the run has ended, waits for people, or was stopped after its turn.

        Raises the error of a run that failed, and RunCancelled for a `cancel()` that came before
        the final output was stored.
        """
        await asyncio.wait({self._task})
        if self._task.cancelled():
            if self._run.is_complete:
                return self
            raise RunCancelled(self._run.state.run_id, "its caller")
        self._task.result()
        return self

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._events.close()
        _running.discard(task)

    def cancel(self, mode: Literal["now", "after_turn"] = "now") -> None:
        """Stop the run. What was done is stored; `state` can go on from there.

        `now` cancels the model call and the tools; calls that have ended are stored with their
        outputs. `after_turn` lets the turn end. A second cancel is passed on to what still runs.
        """
        if mode == "after_turn":
            self._run.is_to_stop = True
        else:
            self._task.cancel()


_running = set[asyncio.Task[None]]()
"""The loop alone would forget tasks that nobody else refers to."""
