"""Drives one run in this process: turn after turn, each of them saved before the next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import isawaitable
from typing import Any, Protocol
from uuid import uuid4
from weakref import WeakKeyDictionary

import msgspec
from msgspec.structs import replace

from capsule_tasks.errors import (
    CallbackFailed,
    CapsuleError,
    InvalidSetting,
    NotRewound,
    RunStopped,
    TurnNotStored,
)
from capsule_tasks.errors.base import reason_of
from capsule_tasks.runs.agents.agent import Agent
from capsule_tasks.runs.agents.contexts import RunContext
from capsule_tasks.runs.agents.run_config import RunConfig
from capsule_tasks.runs.compaction import CompactionReport
from capsule_tasks.runs.compaction.of_run import CompactedHistory
from capsule_tasks.runs.contexts import restored_context, saved_context
from capsule_tasks.runs.conversation import Conversation, conversation_of
from capsule_tasks.runs.engine.asking import storing_model_of
from capsule_tasks.runs.engine.ends import TurnDone, TurnFailed
from capsule_tasks.runs.engine.ports import InProcessPorts
from capsule_tasks.runs.engine.setup import DEFAULT_MAX_TURNS, AgentBook, RunSetup
from capsule_tasks.runs.engine.turn import Turn
from capsule_tasks.runs.items import normalized
from capsule_tasks.runs.records import Item
from capsule_tasks.runs.state import RunState, ServerConversation
from capsule_tasks.settings import PositiveCount, check_value
from capsule_tasks.storage.awaiting import to_the_end
from capsule_tasks.storage.history.types import PoppedSuffix


class Session(Protocol):
    """The part of a `History` or a `SyncHistory` that a run needs."""

    def get_items(self, limit: int | None = None) -> Any: ...

    def add_items(self, items: list[Item]) -> Any: ...


@dataclass(kw_only=True)
class RunArguments:
    """The arguments of the methods of `Runner`, checked."""

    agent: Agent
    given: str | list[Item] | RunState
    session: Session | None = None
    context: Any = None
    max_turns: int | None = None
    config: RunConfig = field(default_factory=RunConfig)
    conversation_id: str | None = None
    previous_response_id: str | None = None

    def __post_init__(self) -> None:
        given: object = self.given
        if not isinstance(self.agent, Agent):
            raise InvalidSetting("agent", self.agent, "an Agent")
        if not isinstance(given, str | list | RunState) or given in ("", []):
            must = "a text or a list of items, not empty, or a RunState"
            raise InvalidSetting("input", given, must)
        if not isinstance(given, RunState):
            try:
                msgspec.json.encode(normalized(given))
            except UnicodeEncodeError as error:
                must = f"text that UTF-8 can write: {error}"
                raise InvalidSetting("input", given, must) from None
        if self.max_turns is not None:
            check_value("max_turns", self.max_turns, PositiveCount)
        if not isinstance(self.config, RunConfig):
            raise InvalidSetting("run_config", self.config, "a RunConfig")
        if self.session is not None and not callable(getattr(self.session, "add_items", None)):
            raise InvalidSetting("session", self.session, "a History or a SyncHistory")

    def first_state(self, book: AgentBook) -> RunState:
        """The state with which the run begins, or goes on."""
        if isinstance(self.given, RunState):
            state = self.given
            return state if self.max_turns is None else replace(state, max_turns=self.max_turns)
        first = book.identity(self.agent)
        server = None
        if (
            self.conversation_id
            or self.previous_response_id
            or self.config.auto_previous_response_id
        ):
            server = ServerConversation(self.conversation_id, self.previous_response_id)
        return RunState(
            run_id=str(uuid4()),
            start_agent=first,
            agent=first,
            max_turns=self.max_turns or DEFAULT_MAX_TURNS,
            input=self.given,
            conversation=server,
        )


class InProcessRun:
    """One call of a run: what it has done so far, and the loop that does it."""

    def __init__(
        self, arguments: RunArguments, publish: Callable[[str, str, Any], None] | None = None
    ) -> None:
        if arguments.session is not None:
            _check_rewound(arguments.session)
        self.session = arguments.session
        self.config = arguments.config
        self.book = AgentBook(arguments.agent)
        self.state = arguments.first_state(self.book)
        """The state after the last completed turn."""
        context = restored_context(self.state.context, override=arguments.context)
        self.context = RunContext(
            run_id=self.state.run_id,
            session_id=getattr(arguments.session, "session_id", None),
            context=context,
        )
        self.items: list[Item] = []
        """The items that the run has made in this call, and stored if it has a session."""
        self.final_output: Any = None
        self.is_complete = False
        """Whether the run's last turn is stored."""
        self.is_to_stop = False
        """Whether the run stops after its turn, and can go on from its state later."""
        self._stored: list[Item] = []
        self._rewind_id = str(uuid4())
        self._ports = InProcessPorts(publish)

    async def _begun(self, compacted: CompactedHistory | None) -> Conversation:
        try:
            if compacted is not None:
                self.state, conversation = await compacted.begun(self.state, self._note)
                return conversation
            callback = self.config.session_input_callback
            return await conversation_of(
                self.state, self.session, callback=callback, refuse_made=True
            )
        except CapsuleError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {reason_of(error)}"
            agent = self.state.agent.name
            failed = CallbackFailed("session_input_callback", agent, reason)
            raise self._ended(failed) from error

    async def drive(self) -> None:
        """Make turns until the run ends, waits for people, or is to stop."""
        setup = RunSetup(self.book, self.config, self.context, self.state.max_turns)
        compacted = CompactedHistory.of(self.config, self.session, self.state)
        conversation = await self._begun(compacted)
        if own := self.state.stored_items or len(self.state.held_items):
            self._ports.know(conversation.view[-own:])
        shown = None
        while True:
            if self._ports.is_watched and self.state.agent != shown:
                shown = self.state.agent
                self._ports.publish("agent", shown.name)
            done = await self._turn(setup, conversation)
            conversation = done.conversation
            if done.step == "final" and compacted is not None:
                model = storing_model_of(self.config, self.book.agent(done.state.agent))
                self.state = await compacted.at_the_end(done, model, self._note)
            if done.step != "next" or self.is_to_stop:
                return
            if compacted is not None:
                self.state, conversation = await compacted.between_turns(
                    done.state, conversation, self._note
                )

    def whole_state(self) -> RunState:
        """The state with the context, as far as it can be stored."""
        return replace(self.state, context=saved_context(self.context.context))

    async def rewind(self) -> PoppedSuffix:
        """Remove exactly what this call has stored from the end of the history, or nothing."""
        session: Any = self.session
        if session is None or not hasattr(session, "pop_suffix"):
            raise NotRewound("the run has no session that can remove its items")
        _rewinding[session] = self._rewind_id
        found = session.pop_suffix(self._stored, operation_id=self._rewind_id)
        popped: PoppedSuffix = await found if isawaitable(found) else found
        if _rewinding.get(session) == self._rewind_id:
            del _rewinding[session]
        return popped

    def _note(self, report: CompactionReport) -> None:
        """Show what came of a compaction; the items that it made are items of the run."""
        self.items += report.items
        for kind, data in report.events():
            self._ports.publish(kind, self.state.agent.name, data)

    async def _turn(self, setup: RunSetup, conversation: Conversation) -> TurnDone:
        turn = Turn(setup, self.state, conversation, self._ports)
        # The run's input comes first among the items of the first turn.
        given = len(conversation.new) if conversation.has_history else 0
        try:
            done = await turn.make()
        except TurnFailed as failure:
            await self._save(failure.items, given, failure.state)
            raise self._ended(failure.cause) from failure.cause.__cause__
        except BaseException:
            # A cancel, or a defect: what was done is stored all the same.
            items, state = turn.cut()
            await self._save(items, given, state)
            raise
        try:
            await self._save(done.items, given, done.state)
        finally:
            # A cancel that comes while the last turn is stored comes too late: it is stored.
            if done.step == "final" and self.state is done.state:
                self.is_complete, self.final_output = True, done.output
        return done

    async def _save(self, items: list[Item], given: int, state: RunState) -> None:
        """Store the items of a turn, once and whole; a cancel waits for that."""
        if self.session is None or not items:
            self._saved(items, given, state)
            return
        try:
            await to_the_end(self._store(self.session, items, given, state))
        except Exception as error:
            raise self._ended(TurnNotStored(str(error), items)) from error

    async def _store(
        self, session: Session, items: list[Item], given: int, state: RunState
    ) -> None:
        adding = session.add_items(items)
        if isawaitable(adding):
            await adding
        self._stored += items
        self._saved(items, given, state)

    def _saved(self, items: list[Item], given: int, state: RunState) -> None:
        self.items += items[given:]
        self.state = state

    def _ended(self, error: Exception) -> Exception:
        """The error that ends the run, with what it needs to know about it."""
        if isinstance(error, RunStopped):
            error.keep(self.whole_state(), self.items, self.rewind)
        return error


_rewinding = WeakKeyDictionary[Any, str]()
"""Sessions with a rewind that is not confirmed: whether its items are there is unknown."""


def _check_rewound(session: Session) -> None:
    if session in _rewinding:
        raise NotRewound("the rewind of the run before has failed, and is to be made again first")
