"""RealtimeSession: agents that talk over one connection to a model, and what belongs to that.

The session owns its listener, its connection, its tasks and the queue of its events, and decides
when each of them ends. What it hears is passed on, without waiting, to those who know what to do:

- `Transitions` has the current agent;
- `ToolCalls` makes the calls of tools;
- `Guarding` has guardrails look at what is said;
- `ConversationLog` has the items, and `HistoryWriter` stores them once they are final;
- `EventQueue` has the events for those who iterate over the session.

A session is entered, used and closed; `life.py` has its phases.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

from msgspec.structs import replace

from capsule_tasks.errors import WrongEventLoop
from capsule_tasks.protocol.values import sendable
from capsule_tasks.realtime.conversation.log import ConversationLog
from capsule_tasks.realtime.conversation.saving import HistoryWriter
from capsule_tasks.realtime.events import (
    RealtimeErrorEvent,
    RealtimeEvent,
    RealtimeHistoryAdded,
    RealtimeToolUpdate,
)
from capsule_tasks.realtime.guarding import Guarding
from capsule_tasks.realtime.host import AgentSnapshot
from capsule_tasks.realtime.model import (
    Command,
    Interrupt,
    RealtimeModel,
    SendAudio,
    SendItems,
    SendMessage,
)
from capsule_tasks.realtime.responses import Responses
from capsule_tasks.realtime.session.event_queue import EventQueue
from capsule_tasks.realtime.session.life import Phase, SessionLife
from capsule_tasks.realtime.session.listening import ModelListener
from capsule_tasks.realtime.session.tasks import OwnedTasks
from capsule_tasks.realtime.session.transitions import Transitions, snapshot_of
from capsule_tasks.realtime.settings import RealtimeConfig, RealtimeModelConfig
from capsule_tasks.realtime.tool_calls import ToolCalls
from capsule_tasks.runs.agents.agent import Agent
from capsule_tasks.runs.agents.checking import check
from capsule_tasks.runs.agents.contexts import RunContext
from capsule_tasks.runs.agents.run_config import RunConfig
from capsule_tasks.runs.approvals import PendingCall
from capsule_tasks.runs.contexts import restored_context, saved_context
from capsule_tasks.runs.engine.setup import DEFAULT_MAX_TURNS, AgentBook, RunSetup
from capsule_tasks.runs.identity import AgentId
from capsule_tasks.runs.records import Item, Spent
from capsule_tasks.runs.state import RunState

Content = str | Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""A message: its text, its parts, or a message item of the user."""


class RealtimeSession:
    """A conversation with a realtime model. `RealtimeRunner.run` makes sessions.

    `async with session` connects, and closes. Tools and guardrails run in tasks of the session, in
    copies of the context of whoever has entered it: a ContextVar that was set before is visible.
    `async for event in session` gives the events; several may iterate, and each event goes to one
    of them. The iteration ends when the session is closed, or raises the error with which it
    failed, after the events that came before.
    """

    def __init__(
        self,
        agent: Agent,
        make_model: Callable[[], RealtimeModel],
        config: RealtimeConfig,
        model_config: RealtimeModelConfig,
        context: Any,
        history: Any | None,
        state: RunState | None,
    ) -> None:
        book = AgentBook(agent)
        first = book.identity(agent)
        begun = state or RunState(
            run_id=str(uuid4()), start_agent=first, agent=first, max_turns=DEFAULT_MAX_TURNS
        )
        self._state = begun
        self._first_agent = book.agent(begun.agent)
        self.context = RunContext(
            run_id=begun.run_id,
            session_id=getattr(history, "session_id", None),
            context=restored_context(begun.context, override=context),
            turn=begun.turn,
            usage=begun.total_usage(),
        )
        self._run = RunSetup(book, RunConfig(), self.context, begun.max_turns)
        self._make_model = make_model
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._config = config
        self._model_config = model_config
        self._model: RealtimeModel | None = None
        self._transitions: Transitions | None = None
        self.abandoned: tuple[PendingCall, ...] = ()
        """Calls that waited for a decision when the session closed, and that `state` lacks."""

        self._queue = EventQueue(config.event_limit, config.audio_limit_bytes)
        self._log = ConversationLog()
        self._writer = HistoryWriter(history, begun, self._report)
        responses = Responses(config.guardrail_debounce_chars)
        self._guarding = Guarding(self, config, responses)
        self._calls = ToolCalls(self, self._record, begun)
        self._listener = ModelListener(
            host=self,
            config=config,
            queue=self._queue,
            log=self._log,
            writer=self._writer,
            responses=responses,
            guarding=self._guarding,
            calls=self._calls,
            on_spent=self._add_usage,
        )
        self._life = SessionLife(
            OwnedTasks(self._report, config.close_timeout_s),
            self._on_close,
            *(self._end_calls, self._disconnect, self._store_rest),
        )

    # --- what it is and has -----------------------------------------------------------------------

    @property
    def agent(self) -> Agent:
        """The agent that the model works as."""
        return self._first_agent if self._transitions is None else self.snapshot.agent

    @property
    def model(self) -> RealtimeModel:
        """The model of the session, once it is entered."""
        if self._model is None:
            raise self._life.closed()
        return self._model

    @property
    def history(self) -> list[Item]:
        """The items of the conversation as it is now. They are not to be changed."""
        return self._log.items()

    @property
    def usage(self) -> Spent:
        """The usage of all answers and tools, with that of the state that was gone on from."""
        return self._calls.in_state(self._state, self._run.book.start).total_usage()

    @property
    def state(self) -> RunState:
        """The state with which another session, or a run, goes on once this session is closed."""
        book = self._run.book if self._transitions is None else self.snapshot.run.book
        state = replace(
            self._state,
            start_agent=book.identity(book.start),
            agent=book.identity(self.agent),
            context=saved_context(self.context.context),
        )
        return self._writer.in_state(self._calls.in_state(state, book.start))

    # --- opening ----------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Resolve the agent, read the history, and connect. A failure leaves nothing behind."""
        await self._life.open(self._open)
        return self

    async def _open(self) -> None:
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        over = self._model_config.settings.over(self._config.settings)
        snapshot = await snapshot_of(self._first_agent, self._run, over)
        self._transitions = Transitions(self, snapshot, over)
        self._life.add_to_cleanup(self._store_rest)
        items = self._log.load(await self._writer.begin())
        self._model = model = self._make_model()
        model.add_listener(self._listener, server_events=self._config.raw_server_events)
        try:
            with self._queue.without_pause():
                await model.connect(self._model_config, snapshot.settings)
        except BaseException:
            # At once: a model that is in use has events of another session.
            model.remove_listener(self._listener)
            raise
        self._life.add_to_cleanup(self._disconnect)
        if items:
            await self.send(SendItems(items))
        self._calls.resume(snapshot)
        # Not before: a session that fails to open gives up no call.
        self._life.add_to_cleanup(self._end_calls)

    # --- events and commands ----------------------------------------------------------------------

    def __aiter__(self) -> AsyncIterator[RealtimeEvent]:
        if self._life.phase is Phase.NEW:
            raise self._life.closed()
        self._check_loop("async for")
        return self._queue

    async def send_message(self, message: Content) -> None:
        """Send a message of the user, which the model answers.

        A message that a guardrail with `parallel=False` refuses is not sent.
        """
        self._check_open("send_message")
        content = _parts_of(message)
        text = "\n".join(part["text"] for part in content if part["type"] == "input_text")
        # In a task of the session, whose close does not leave the caller waiting for a guardrail.
        if await self._life.ask(self._guarding.allows(text), "guardrails of a message"):
            self._guarding.said(text, None)
            await self.send(SendMessage(content))

    async def send_audio(
        self, data: bytes | bytearray | memoryview, *, commit: bool = False
    ) -> None:
        """Send a piece of what the user says. `commit` ends the turn where no server detects it."""
        self._check_open("send_audio")
        check("data", data, isinstance(data, bytes | bytearray | memoryview), "bytes")
        await self.send(SendAudio(bytes(data), commit))

    async def interrupt(self) -> None:
        """Stop the answer that is being made, and the audio that is being played."""
        self._check_open("interrupt")
        await self.send(Interrupt())

    async def update_agent(self, agent: Agent) -> None:
        """Have the model work as another agent, and return once it has accepted that.

        Raises RealtimeRefused, or InvalidSetting for what a realtime model cannot honour; the agent
        is the same as before then. A cancel of the caller does not cut the change half-way. Raises
        SessionStateError in a function that such a change calls.
        """
        self._check_open("update_agent")
        check("agent", agent, isinstance(agent, Agent), "an Agent")
        assert self._transitions is not None
        self._transitions.check_caller()
        await self._life.do(self._transitions.update(agent), "update of the agent")

    async def approve_tool_call(self, call_id: str, *, always: bool = False) -> None:
        """Have a waiting call made; with `always` also all other calls of its tool by its agent.

        Raises UnknownCall if no such call waits.
        """
        self._check_open("approve_tool_call")
        self._calls.approve(call_id, always=always)

    async def reject_tool_call(
        self, call_id: str, *, always: bool = False, message: str | None = None
    ) -> None:
        """Refuse a waiting call; the message is for the model. Raises UnknownCall."""
        self._check_open("reject_tool_call")
        self._calls.reject(call_id, always=always, message=message)

    # --- closing ----------------------------------------------------------------------------------

    async def close(self) -> None:
        """Release everything. It may be called from anywhere, by several at once, and repeatedly.

        All steps of the cleanup are tried; the first error is raised, and another `close()` makes
        the steps again that have failed. A cancel of the caller does not stop the cleanup, and
        another `close()` waits for its end. A task of the session, such as a tool, is cancelled by
        the close that it asks for.
        """
        if self._life.phase is not Phase.CLOSED:
            self._check_loop("close")
        await self._life.close()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            await self.close()
        else:
            await self._life.close_after(error)

    def _on_close(self, failure: Exception | None) -> None:
        """Hear nothing any more, and let those who iterate come to the end."""
        self._queue.close(failure)
        if self._model is not None:
            self._model.remove_listener(self._listener)

    # The steps of the cleanup, in their order, once all tasks have ended.

    async def _end_calls(self) -> None:
        self.abandoned = self._calls.end(self._config.open_approvals)

    async def _disconnect(self) -> None:
        await self.model.close()

    async def _store_rest(self) -> None:
        self._writer.add(self._log.take_final(at_end=True))
        await self._writer.flush(self._config.close_timeout_s)

    # --- what the parts of the session may do (SessionHost) ---------------------------------------

    @property
    def snapshot(self) -> AgentSnapshot:
        if self._transitions is None:
            raise self._life.closed()
        return self._transitions.current

    @property
    def is_open(self) -> bool:
        return self._life.is_active

    def emit(self, event: RealtimeEvent) -> None:
        """Show an event; may be called in any thread, as tools are."""
        is_droppable = isinstance(event, RealtimeToolUpdate)
        put = self._queue.put_droppable if is_droppable else self._queue.put
        if self._loop is None or threading.get_ident() == self._thread:
            put(event)
        else:
            self._loop.call_soon_threadsafe(put, event)

    async def send(self, command: Command) -> None:
        if not await self.send_if(command, lambda: True):
            raise self._life.closed()

    async def send_if(self, command: Command, condition: Callable[[], bool]) -> bool:
        if not self.is_open:
            return False
        with self._queue.without_pause():
            return await self.model.send_event_if(command, lambda: self.is_open and condition())

    def start(self, work: Coroutine[Any, Any, None], about: str) -> asyncio.Task[None]:
        return self._life.start(work, about)

    def end(self, failure: Exception | None) -> None:
        self._life.end(failure)

    async def hand_over(self, to: Agent, of: AgentSnapshot) -> None:
        assert self._transitions is not None
        await self._life.do(self._transitions.hand_over(to, of), "handoff")

    # --- what callers may do when, and where ------------------------------------------------------

    def _check_open(self, call: str) -> None:
        self._check_loop(call)
        self._life.check_open()

    def _check_loop(self, call: str) -> None:
        """Raises WrongEventLoop on another loop than that on which the session was entered."""
        if self._loop is not None and self._loop is not asyncio.get_running_loop():
            hint = "call it there, as by `asyncio.run_coroutine_threadsafe`"
            raise WrongEventLoop(call, "the realtime session", hint)

    # --- what the parts of the session tell it ----------------------------------------------------

    def _add_usage(self, agent: AgentId, spent: Spent) -> None:
        self._state = self._state.with_usage(agent, spent)
        self.context.usage = self._state.total_usage()

    def _record(self, item: Item) -> None:
        self._log.add(item)
        self._queue.put(RealtimeHistoryAdded(item))
        self._writer.add(self._log.take_final())

    def _report(self, error: Exception) -> None:
        self.emit(RealtimeErrorEvent(error))


def _parts_of(message: Content) -> tuple[Mapping[str, Any], ...]:
    """The parts of a message, checked as far as this side knows them."""
    given: Any = message
    if isinstance(given, Mapping):
        is_of_user = given.get("type", "message") == "message" and given.get("role") == "user"
        given = given.get("content") if is_of_user else None
    if isinstance(given, str) and given:
        given = [{"type": "input_text", "text": given}]
    is_list = isinstance(given, Sequence) and not isinstance(given, str | bytes | bytearray)
    must = "a text, parts such as {'type': 'input_text', 'text': …}, or a message of the user"
    check("message", message, is_list and given and all(map(_is_part, given)), must)
    # A terminal gives text that UTF-8 lacks for bytes that are none.
    return tuple(
        {**part, "text": sendable(part["text"])} if part["type"] == "input_text" else part
        for part in given
    )


def _is_part(part: object) -> bool:
    if not isinstance(part, Mapping):
        return False
    kind = part.get("type")
    return isinstance(kind, str) and (kind != "input_text" or isinstance(part.get("text"), str))
