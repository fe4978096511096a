"""Runs the guardrails of a session on what the model answers, and on what the user says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Literal, TypeVar

from capsule_tasks.realtime.events import RealtimeGuardrailTripped
from capsule_tasks.realtime.host import AgentSnapshot, SessionHost
from capsule_tasks.realtime.model import (
    Interrupt,
    ResponseEnded,
    ResponseStarted,
    SendMessage,
    TextDelta,
)
from capsule_tasks.realtime.responses import Check, Responses
from capsule_tasks.realtime.settings import RealtimeConfig
from capsule_tasks.runs.agents.guardrails import InputGuardrail, OutputGuardrail
from capsule_tasks.runs.engine.guardrails import Guardrails
from capsule_tasks.runs.records import GuardrailResult

G = TypeVar("G", InputGuardrail, OutputGuardrail)

_ANSWER_STOPPED = (
    "Your last answer was stopped by a guardrail: {}. "
    "Do not repeat what it was about to say; say something that the guardrail allows."
)
_INPUT_REFUSED = (
    "The last message of the user was refused by a guardrail: {}. "
    "Do not answer that message; tell the user that you cannot."
)
"""What the model is told once an answer was stopped, with the names of the guardrails."""


class Guarding:
    """The guardrails of a session. Its calls decide at once; checks run in tasks of the session."""

    def __init__(self, host: SessionHost, config: RealtimeConfig, responses: Responses) -> None:
        self._host = host
        self._config = config
        self._responses = responses

    # --- answers -----------------------------------------------------------------------------

    def started(self, event: ResponseStarted) -> None:
        """An answer begins: the current agent gives it, and its guardrails look at all of it."""
        snapshot = self._host.snapshot
        is_checked = bool(self._output_guardrails(snapshot))
        refused_by = self._responses.started(event.response_id, snapshot, is_checked)
        if refused_by:
            stopping = self._stop(event.response_id, _INPUT_REFUSED, refused_by)
            self._host.start(stopping, f"stopping the answer {event.response_id}")

    def text(self, event: TextDelta) -> None:
        if event.response_id not in self._responses.answers:
            # A model that does not tell of the start must not get around the guardrails.
            self.started(ResponseStarted(event.response_id))
        check = self._responses.text(event.response_id, event.item_id, event.delta)
        if check is not None:
            self._start_check(check)

    def ended(self, event: ResponseEnded) -> None:
        """An answer has ended. Afterwards `Responses` may have forgotten it."""
        for check in self._responses.ended(event.response_id):
            self._start_check(check)

    def _start_check(self, check: Check) -> None:
        about = f"output guardrails on the answer {check.answer.response_id}"
        self._host.start(self._check_answer(check), about)

    async def _check_answer(self, check: Check) -> None:
        answer, speaker = check.answer, check.answer.speaker
        guardrails = self._output_guardrails(speaker)
        results = await self._tripped("output", speaker, guardrails, check.text)
        # Marked before anything is awaited, as several checks of an answer may trip at once.
        if results and answer.stop():
            about = (speaker.agent, results, check.text, answer.response_id)
            self._host.emit(RealtimeGuardrailTripped(*about))
            names = [each.name for each in results]
            await self._stop(answer.response_id, _ANSWER_STOPPED, names)

    async def _stop(self, response_id: str, why: str, guardrails: Sequence[str]) -> None:
        """Stop an answer and its audio, and tell the model why, unless a newer one has begun."""
        await self._host.send(Interrupt(response_id))
        message = why.format(", ".join(guardrails))
        await self._host.send_if(
            SendMessage(({"type": "input_text", "text": message},)),
            lambda: self._responses.latest == response_id,
        )

    # --- inputs of the user ------------------------------------------------------------------

    def heard(self, item_id: str) -> None:
        """Audio of the user has become an item, whose transcript may come later, or never.

        Answers that begin from now on are about it, also if they begin before the transcript.
        """
        self._responses.heard(item_id, self._host.snapshot)

    async def allows(self, text: str) -> bool:
        """Whether a message of the user may be sent, by the guardrails that want to be asked."""
        snapshot = self._host.snapshot
        guardrails = [each for each in self._input_guardrails(snapshot) if not each.parallel]
        results = await self._tripped("input", snapshot, guardrails, text)
        if results:
            self._host.emit(RealtimeGuardrailTripped(snapshot.agent, results, text))
        return not results

    def said(self, text: str, item_id: str | None) -> None:
        """Check what the user has written, just before it is sent, or the transcript of an item.

        Guardrails that run before a message is sent look at transcripts here: audio is sent
        before anybody knows what it says.
        """
        input_id: object = item_id
        if item_id is None:
            input_id = object()
            self._responses.heard(input_id, self._host.snapshot)
        listener = self._responses.listener(input_id) or self._host.snapshot
        guardrails = self._input_guardrails(listener)
        if item_id is None:
            guardrails = [each for each in guardrails if each.parallel]
        if guardrails:
            checking = self._check_input(input_id, listener, guardrails, text)
            self._host.start(checking, "input guardrails")

    async def _check_input(
        self,
        input_id: object,
        listener: AgentSnapshot,
        guardrails: Sequence[InputGuardrail],
        text: str,
    ) -> None:
        results = await self._tripped("input", listener, guardrails, text)
        if results:
            refused_by = [each.name for each in results]
            stopped = self._responses.refused(input_id, refused_by)
            self._host.emit(RealtimeGuardrailTripped(listener.agent, results, text, stopped))
            if stopped is not None:
                await self._stop(stopped, _INPUT_REFUSED, refused_by)

    # --- small parts -------------------------------------------------------------------------

    def _input_guardrails(self, snapshot: AgentSnapshot) -> list[InputGuardrail]:
        return _once(snapshot.agent.input_guardrails, self._config.input_guardrails)

    def _output_guardrails(self, snapshot: AgentSnapshot) -> list[OutputGuardrail]:
        return _once(snapshot.agent.output_guardrails, self._config.output_guardrails)

    async def _tripped(
        self,
        kind: Literal["input", "output"],
        snapshot: AgentSnapshot,
        guardrails: Sequence[InputGuardrail | OutputGuardrail],
        text: str,
    ) -> tuple[GuardrailResult, ...]:
        """The results of the guardrails that tripped; a message of images alone has no text."""
        results: list[GuardrailResult] = []
        able = snapshot.able
        checks = Guardrails(able.agent, able.identity, snapshot.run.context, results.append)
        if text and guardrails and await checks.trips(kind, guardrails, text):
            return tuple(each for each in results if each.tripped)
        return ()


def _once(of_agent: Iterable[G], of_config: Iterable[G]) -> list[G]:
    """The guardrails of an agent and of the session; one that is in both comes once."""
    each_once: dict[int, G] = {id(each): each for each in chain(of_agent, of_config)}
    return list(each_once.values())
