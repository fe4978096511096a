"""The compaction of a run's history, between its turns.

It is done when the items of a turn are stored and no tool call waits, before the next turn begins:
a turn that was begun may have a recorded reply to the view that it had. A compaction that fails is
no failure of the run. The history is as it was, and is compacted later.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from capsule_tasks.errors import InvalidSetting
from capsule_tasks.errors.base import reason_of
from capsule_tasks.runs.agents.run_config import RunConfig
from capsule_tasks.runs.compaction.compacting import (
    Chain,
    CompactionReport,
    Outcome,
    check_history,
    compact,
)
from capsule_tasks.runs.compaction.policy import Compaction, CompactionWatch, Seen
from capsule_tasks.runs.conversation import Conversation, View, conversation_of
from capsule_tasks.runs.items import for_model
from capsule_tasks.runs.models import Model
from capsule_tasks.runs.preparing import items_of
from capsule_tasks.runs.state import RunState

if TYPE_CHECKING:
    from capsule_tasks.runs.engine.ends import TurnDone

_SEEN_ANEW: tuple[Outcome, ...] = ("replaced", "nothing", "conflict")
"""After these outcomes the view is made again: in two of them, the history is not what the model
sees, as somebody else has compacted it, for example."""

Told = Callable[[CompactionReport], None]

_log = logging.getLogger(__name__)


class CompactedHistory:
    """The history of a run in the process that makes its turns, kept short by a policy.

    `told` is called with the report of each compaction.
    """

    def __init__(self, policy: Compaction, config: RunConfig, history: Any) -> None:
        check_history(history)
        self._policy, self._config, self._history = policy, config, history
        self._watch = CompactionWatch(policy)
        self._before: Outcome | Literal["unseen"] | None = "unseen"
        """The outcome of the compaction before the last turn; None if there was none."""

    @classmethod
    def of(cls, config: RunConfig, history: Any, state: RunState) -> CompactedHistory | None:
        """None if the run has no policy, or no history.

        Raises InvalidSetting for a policy beside a conversation that the model's server keeps: the
        server has to compact it.
        """
        if config.compaction is None:
            return None
        if state.conversation is not None:
            must = "None, since the model's server keeps the items of this run's conversation"
            raise InvalidSetting("RunConfig.compaction", config.compaction, must)
        return None if history is None else cls(config.compaction, config, history)

    async def begun(self, state: RunState, told: Told) -> tuple[RunState, Conversation]:
        """The state and the conversation of a run that begins, or that another process had."""
        callback = self._config.session_input_callback
        if state.turn or state.stored_items or state.held_items:
            conversation = await conversation_of(state, self._history, callback=callback)
            return await self.between_turns(state, conversation, told)
        items = await items_of(self._history, None)
        report = await self.if_due(View(for_model(items)), told)
        if report is not None and report.is_replaced:
            items = await items_of(self._history, None)
        return _counted(state, report), await conversation_of(state, items, callback=callback)

    async def between_turns(
        self, state: RunState, conversation: Conversation, told: Told
    ) -> tuple[RunState, Conversation]:
        """The state and the conversation before the next turn."""
        if state.calls:
            return state, conversation
        report = await self.if_due(conversation.seen, told)
        state = _counted(state, report)
        if report is not None and report.outcome in _SEEN_ANEW:
            conversation = await conversation_of(state, self._history)
        return state, conversation

    async def at_the_end(self, done: TurnDone, model: Model | None, told: Told) -> RunState:
        """The state after the last turn. `model` gave its reply, if its server has stored it."""
        seen = done.conversation.seen
        return _counted(done.state, await self.if_due(seen, told, self._chain(done, model)))

    async def if_due(
        self, seen: Seen, told: Told, chain: Chain | None = None
    ) -> CompactionReport | None:
        """Compact the history if that is due by what the model sees of it; None if it is not."""
        before, self._before = self._before, None
        if before == "unseen" or before in _SEEN_ANEW:
            self._watch.restart(seen)
        if before in ("replaced", "nothing"):
            # The items that are left may still be too many, or hidden by a filter.
            self._watch.put_off(seen)
        compactor, keep_last = self._policy.compactor, self._policy.keep_last
        try:
            if not self._watch.is_due(seen):
                return None
            report = await compact(self._history, compactor, keep_last=keep_last, chain=chain)
        except Exception as error:  # noqa: BLE001  the run goes on, whatever the compactor raises
            reason = f"{type(error).__name__}: {reason_of(error)}"
            _log.warning("history %r was not compacted: %s", self._history.session_id, reason)
            report = CompactionReport(outcome="failed", error=reason)
        self._before = report.outcome
        if report.outcome in ("failed", "not_smaller"):
            self._watch.put_off(seen)
        told(report)
        return report

    def _chain(self, done: TurnDone, model: Model | None) -> Chain | None:
        """The last response, if its model has seen the whole history and nothing else."""
        is_changed = done.conversation.filtered is not None or self._config.input_filter is not None
        if model is None or done.response_id is None or is_changed:
            return None
        seen = done.conversation.view
        return Chain(done.response_id, len(seen), seen[-1], model)


def _counted(state: RunState, report: CompactionReport | None) -> RunState:
    """The state with what a compaction has used."""
    if report is None or not report.spent.requests:
        return state
    return state.with_usage(state.agent, report.spent)
