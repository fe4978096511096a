"""The tool calls of a session: how far each of them has come, and what to do next. No I/O.

| a call is | it is made again | people decide | its output is made | the session ends |
| --- | --- | --- | --- | --- |
| running | ignored | - | unsent | uncertain if it has begun, else as if it waited |
| waiting | ignored | running | - | kept in the state, or abandoned: unsent |
| unsent | sent at once | - | - | not sent any more |
| sent | ignored | - | - | - |

People may also decide about a call of an agent that is used as a tool while that agent runs; it
goes on with the decision then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from msgspec.structs import replace

from capsule_tasks.errors import CallChanged, UnknownCall
from capsule_tasks.runs.approvals import PendingCall
from capsule_tasks.runs.engine.ports import UNCERTAIN
from capsule_tasks.runs.records import CodeSession
from capsule_tasks.runs.state import RunState

ABANDONED = "This call was not made: the session ended before."
"""The text for the history about a call that was not made, and is not returned either."""

_KNOWN_SENT = 4096
"""The calls with sent outputs that are known if the model makes them again."""


class CallStatus(StrEnum):
    """How far a call has come."""

    RUNNING = "running"
    """A task looks at the call, or makes it."""
    WAITING = "waiting"
    """People are asked about the call, or about calls of the agent that is used as a tool."""
    UNSENT = "unsent"
    """The output is made and recorded; the model does not have it."""
    SENT = "sent"
    """The model has the output."""


_C = CallStatus

TRANSITIONS: dict[CallStatus, frozenset[CallStatus]] = {
    _C.RUNNING: frozenset({_C.WAITING, _C.UNSENT}),
    _C.WAITING: frozenset({_C.RUNNING, _C.UNSENT}),
    _C.UNSENT: frozenset({_C.SENT}),
    _C.SENT: frozenset(),
}
"""A rejected call runs, too: its output says so."""


@dataclass
class _Call:
    pending: PendingCall
    status: CallStatus = CallStatus.RUNNING

    def move(self, to: CallStatus) -> None:
        if to not in TRANSITIONS[self.status]:
            raise AssertionError(f"call {self.pending.call_id!r} is {self.status}, not to be {to}")
        self.status = to


class CallTable:
    """The calls of one session."""

    def __init__(self, state: RunState) -> None:
        """`state` is the one to go on from."""
        self.state = replace(state, usage=())
        """The calls that wait, the decisions, the inner runs, and the usage of those that ended."""
        self.begun: set[str] = set()
        """The ids of running calls whose functions were called."""
        self.abandoned: tuple[PendingCall, ...] = ()
        """The calls that waited, and were abandoned at the end."""
        self._calls = {each.call_id: _Call(each) for each in state.calls}
        self._sent: deque[str] = deque()
        """The ids of the known calls whose outputs were sent, the latest last."""
        self._is_over = False

    def called(self, call: PendingCall) -> Literal["run", "ignore", "send"]:
        """Take a call that the model makes; the answer says what to do about it.

        To `send` is to send the output, which the model does not have yet. Raises CallChanged for
        a known id with another tool or other arguments.
        """
        if self._is_over:
            return "ignore"
        known = self._calls.get(call.call_id)
        if known is None:
            self._calls[call.call_id] = _Call(call)
            return "run"
        if known.pending.fingerprint != call.fingerprint:
            raise CallChanged(call.call_id, "it was made with another tool or other arguments")
        return "send" if known.status is _C.UNSENT else "ignore"

    def knows(self, call_id: str) -> bool:
        """Whether the model has made a call with this id."""
        return call_id in self._calls

    def asks(self, call_id: str) -> bool:
        """Whether a call waits for a decision, perhaps within an agent that is used as a tool."""
        return any(call_id == each.call_id for each in self.state.unresolved())

    def without_approval(self, call: PendingCall) -> PendingCall:
        """The call, about which nobody needs to be asked."""
        found = self._calls[call.call_id]
        found.pending = replace(call, needs_approval=False)
        return found.pending

    def waits(self, call_id: str) -> bool:
        """Have a call wait for people; False if it goes on, since they have decided meanwhile."""
        call = self._calls[call_id]
        if not self._has_to_wait(call.pending):
            return False
        call.move(_C.WAITING)
        self.state = self.state.with_calls([call.pending])
        return True

    def decide(
        self, call_id: str, *, approved: bool, always: bool = False, message: str | None = None
    ) -> list[PendingCall]:
        """Record a decision about a waiting call; the calls that go on with it.

        Raises UnknownCall for the id of a call that does not wait, or was decided about.
        """
        if not self.asks(call_id):
            raise UnknownCall(call_id, "no waiting call of the session has this id")
        if approved:
            self.state = self.state.approve(call_id, always=always)
        else:
            self.state = self.state.reject(call_id, always=always, message=message)
        waiting = self._with_status(_C.WAITING)
        decided = [each for each in waiting if not self._has_to_wait(each.pending)]
        for each in decided:
            each.move(_C.RUNNING)
        return [each.pending for each in decided]

    def note_inner(self, call_id: str, inner: RunState) -> None:
        """Keep an inner run as it is after a turn, with decisions that came during the turn."""
        if self._is_over:
            return
        inner = inner.with_standing(*self.state.approvals.standing)
        if (known := self.state.nested.get(call_id)) is not None:
            inner = _with_decisions_of(known, inner)
        self.state = replace(self.state, nested=self.state.nested | {call_id: inner})

    def note_code(self, code: CodeSession) -> None:
        self.state = self.state.with_code(code)

    def made(self, call_id: str) -> bool:
        """Whether the output of a call that is made now is to be recorded and sent.

        It is not once the session is over, whose history says otherwise.
        """
        if self._is_over:
            return False
        call = self._calls[call_id]
        call.move(_C.UNSENT)
        self.begun.discard(call_id)
        if (inner := self.state.nested.get(call_id)) is not None:
            self.state = self.state.with_usage(call.pending.agent, inner.total_usage())
        self.state = self.state.without_calls([call_id])
        return True

    def sent(self, call_id: str) -> None:
        """Note that the model has the output of a call."""
        self._calls[call_id].move(_C.SENT)
        self._sent.append(call_id)
        if len(self._sent) > _KNOWN_SENT:
            del self._calls[self._sent.popleft()]

    def end(self, open_approvals: Literal["return", "abandon"]) -> Mapping[str, str]:
        """End the session; the outputs, by call, that are to be recorded. Again, there are none.

        A function that was called has an unknown outcome. All other calls are kept in the state,
        where inner runs go on as far as they have come, unless they are to be abandoned.
        """
        if self._is_over:
            return {}
        outputs: dict[str, str] = {}
        abandoned: list[PendingCall] = []
        for call in self._open():
            call_id, inner = call.call_id, self.state.nested.get(call.call_id)
            if call_id in self.begun:
                outputs[call_id] = UNCERTAIN
            elif open_approvals == "abandon":
                outputs[call_id] = ABANDONED if inner is None else UNCERTAIN
                abandoned += [call] if inner is None else inner.unresolved()
        for call_id in outputs:
            self.made(call_id)
        self._is_over, self.abandoned = True, tuple(abandoned)
        return outputs

    def with_usage(self, state: RunState) -> RunState:
        """The state with the usage of calls that are over."""
        for used in self.state.usage:
            state = state.with_usage(used.agent, used)
        return state

    def in_state(self, state: RunState) -> RunState:
        """The state with the calls that can be made later, all decisions, and inner runs."""
        calls = {each.call_id: each for each in self._open() if each.call_id not in self.begun}
        nested = {each: inner for each, inner in self.state.nested.items() if each in calls}
        state = self.with_usage(state)
        return replace(
            state,
            calls=tuple(calls.values()),
            approvals=self.state.approvals,
            nested=nested,
            code=self.state.code,
        )

    def _open(self) -> list[PendingCall]:
        """The calls without an output."""
        return [each.pending for each in self._with_status(_C.RUNNING, _C.WAITING)]

    def _with_status(self, *statuses: CallStatus) -> list[_Call]:
        return [each for each in self._calls.values() if each.status in statuses]

    def _has_to_wait(self, call: PendingCall) -> bool:
        """Whether a call that needs decisions has none yet that it could go on with."""
        if call.needs_approval and self.state.decision_for(call) is None:
            return True
        inner = self.state.nested.get(call.call_id)
        return inner is not None and not _has_decision(inner)


def _has_decision(run: RunState) -> bool:
    """Whether people have decided about a call that waits in a run, or in one within it."""
    own = (each for each in run.calls if each.needs_approval and each.call_id not in run.nested)
    return any(map(run.decision_for, own)) or any(map(_has_decision, run.nested.values()))


def _with_decisions_of(before: RunState, after: RunState) -> RunState:
    """An inner run after a turn, with decisions about its calls that came during the turn."""
    waiting = {call.call_id for call in after.calls}
    known = after.approvals.exact
    new = [each for each in before.approvals.exact if each.call_id in waiting and each not in known]
    nested = {
        each: _with_decisions_of(before.nested[each], inner) if each in before.nested else inner
        for each, inner in after.nested.items()
    }
    approvals = replace(after.approvals, exact=(*known, *new))
    return replace(after, approvals=approvals, nested=nested)
