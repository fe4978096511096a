"""The answers of a session: who gives them, what was said, and which of them were stopped."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from capsule_tasks.realtime.host import AgentSnapshot


@dataclass(slots=True)
class _Text:
    """The text of an item of an answer so far, and how much of the text was checked."""

    said: str = ""
    checked_length: int = 0


@dataclass(eq=False, slots=True)
class Answer:
    """One answer of the model."""

    response_id: str
    speaker: AgentSnapshot
    is_checked: bool
    """Whether output guardrails want its text."""
    texts: dict[str, _Text] = field(default_factory=dict)
    """By the ids of items; empty once the answer has ended or was stopped."""
    has_ended: bool = False
    is_stopped: bool = False

    def stop(self) -> bool:
        """Mark the answer as stopped; False if it is so already."""
        if self.is_stopped:
            return False
        self.is_stopped = True
        self.texts.clear()
        return True


@dataclass(frozen=True, slots=True)
class Check:
    """A text of an answer that the output guardrails have to see."""

    answer: Answer
    text: str


class Responses:
    """The answers of a session, and the inputs that they are about.

    A turn is what answers the same inputs of the user: the first answer that begins after them,
    and those that follow it, such as after a tool call, until the user has said something else.
    """

    def __init__(self, chars_between_checks: int) -> None:
        self.latest: str | None = None
        """The answer that began last."""
        self.answers: dict[str, Answer] = {}
        """Those that have not ended, and the latest one: its audio may be played still."""
        self._chars_between_checks = chars_between_checks
        self._inputs: dict[object, AgentSnapshot] = {}
        """The inputs that the current turn answers, with the agents that the user spoke to."""
        self._new_inputs: dict[object, AgentSnapshot] = {}
        """The inputs that the next turn answers."""
        self._refusals: dict[str, None] = {}
        """Names of guardrails that refuse what the next answer would be about."""

    # --- answers -----------------------------------------------------------------------------

    def started(
        self, response_id: str, snapshot: AgentSnapshot, is_checked: bool
    ) -> tuple[str, ...]:
        """An answer begins.

        Returns the names of input guardrails that have refused what it is about: it is stopped.
        """
        known = self.answers.get(response_id)
        if known is not None and not known.has_ended:
            return ()
        if self._new_inputs:
            # Answers to earlier inputs are over: nothing can be stopped for them any more.
            self._inputs, self._new_inputs = self._new_inputs, {}
        refused_by, self._refusals = tuple(self._refusals), {}
        self.answers = {key: each for key, each in self.answers.items() if not each.has_ended}
        answer = Answer(response_id, snapshot, is_checked, is_stopped=bool(refused_by))
        self.answers[response_id] = answer
        self.latest = response_id
        return refused_by

    def text(self, response_id: str, item_id: str, delta: str) -> Check | None:
        """A piece of text has come. Returns the check that is due.

        Thresholds count the text of an item: that is what the history has as one message. Texts
        of two items of an answer are not mixed, in whichever order their pieces come.
        """
        answer = self.answers.get(response_id)
        if answer is None or not answer.is_checked or answer.is_stopped:
            return None
        text = answer.texts.setdefault(item_id, _Text())
        text.said += delta
        every = self._chars_between_checks
        is_due = len(text.said) // every > text.checked_length // every
        return _next_check(answer, text) if is_due or answer.has_ended else None

    def ended(self, response_id: str) -> list[Check]:
        """An answer has ended, also by a cancel: its text may be played, and is in the history.

        Returns the checks of texts whose ends no check has seen.
        """
        answer = self.answers.get(response_id)
        if answer is None or answer.has_ended:
            return []
        answer.has_ended = True
        unseen = [text for text in answer.texts.values() if text.checked_length < len(text.said)]
        checks = [_next_check(answer, text) for text in unseen]
        answer.texts.clear()
        if response_id != self.latest:
            del self.answers[response_id]
        return checks

    def is_stopped(self, response_id: str) -> bool:
        """Whether a guardrail has stopped an answer, so that its audio must not be played."""
        answer = self.answers.get(response_id)
        return answer is not None and answer.is_stopped

    def speaker(self, response_id: str) -> AgentSnapshot | None:
        """The agent that gives an answer; None if the answer is forgotten."""
        answer = self.answers.get(response_id)
        return None if answer is None else answer.speaker

    # --- inputs of the user ------------------------------------------------------------------

    def heard(self, input_id: object, listener: AgentSnapshot) -> None:
        """The user has said or written something, to whoever is the agent now."""
        self._new_inputs[input_id] = listener

    def listener(self, input_id: object) -> AgentSnapshot | None:
        """To whom the user said something; None if another turn has begun since it was answered."""
        return self._new_inputs.get(input_id) or self._inputs.get(input_id)

    def refused(self, input_id: object, refused_by: Iterable[str]) -> str | None:
        """An input was refused by guardrails of these names.

        Returns the answer that is to be stopped now, if there is one: the latest, unless it is
        about something else. If no answer has begun, the next one is stopped when it begins.
        """
        if input_id in self._new_inputs:
            self._refusals.update(dict.fromkeys(refused_by))
        elif input_id in self._inputs and self.latest is not None:
            return self.latest if self.answers[self.latest].stop() else None
        return None


def _next_check(answer: Answer, text: _Text) -> Check:
    text.checked_length = len(text.said)
    return Check(answer, text.said)
