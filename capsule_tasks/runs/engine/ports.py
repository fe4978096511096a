"""The ports of a turn: how models are asked and tools are called, in process or durably."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from hashlib import sha256
from typing import Any, Protocol

from capsule_tasks.errors import CallChanged, ToolTimeout
from capsule_tasks.runs.agents.tools import OnUncertain
from capsule_tasks.runs.approvals import PendingCall, fingerprint_of
from capsule_tasks.runs.engine.deciding import called_tool
from capsule_tasks.runs.models.model import ModelReply
from capsule_tasks.runs.records import Item
from capsule_tasks.storage.keys import MAX_ID_BYTES

Output = str | list[Item]
"""The output of a tool as the model gets it: text, or parts such as images. It is JSON."""

UNCERTAIN = (
    "This call was started and did not finish. Whether it took effect is unknown. Find out before "
    "you make it again."
)
"""The text for the model about a call whose outcome is unknown."""

_MAX_KEY_BYTES = MAX_ID_BYTES - 64
"""A request to settle a call has the key in its id."""


class TurnPorts(Protocol):
    """The effects of a turn outside of this process's memory."""

    is_watched: bool
    """Whether anybody sees the events; without watchers none are made, and nothing is streamed."""

    async def ask(
        self,
        path: tuple[str, ...],
        question: str,
        make: Callable[[], Awaitable[ModelReply]],
        *,
        is_held: bool,
    ) -> ModelReply:
        """The reply to a question, by `make`, or as it was given before.

        `path` are the ids of the enclosing tool calls, `question` is a digest of the request. With
        `is_held` nothing acts on the reply before a tool is called or the turn is over, so it may
        be recorded as late as that.
        """
        ...

    async def call(
        self,
        call: PendingCall,
        key: str,
        on_uncertain: OnUncertain | None,
        make: Callable[[bool], Awaitable[Output]],
    ) -> Output:
        """The output of a tool call, by `make(is_repeat)`, or as it was recorded under this key.

        CallChanged refuses a key that was used with another tool or other arguments. `make` raises
        ToolTimeout for a call that took too long: whether it was made is unknown.
        """
        ...

    def publish(self, kind: str, agent: str, data: Any = None) -> None:
        """Show an event to those who watch."""
        ...


class InProcessPorts:
    """The ports of a run that lives and ends with this process."""

    def __init__(self, publish: Callable[[str, str, Any], None] | None = None) -> None:
        self.is_watched = publish is not None
        self._publish = publish
        self._made: dict[str, tuple[str, Output]] = {}
        """The fingerprint and the output of each call, by its key."""
        self._seen: dict[str, str] = {}
        """The fingerprints of calls that were made before this process had the run."""

    def know(self, items: Iterable[Item]) -> None:
        """Know the calls of a run that goes on: none may come again with other arguments."""
        for item in items:
            match item:
                case {"type": "function_call", "call_id": str(), "name": str(), "arguments": str()}:
                    fingerprint = fingerprint_of(called_tool(item).text, item["arguments"])
                    self._seen[key_of((), item["call_id"])] = fingerprint

    async def ask(
        self,
        path: tuple[str, ...],  # noqa: ARG002  nothing is recorded
        question: str,  # noqa: ARG002
        make: Callable[[], Awaitable[ModelReply]],
        *,
        is_held: bool,  # noqa: ARG002
    ) -> ModelReply:
        return await make()

    async def call(
        self,
        call: PendingCall,
        key: str,
        on_uncertain: OnUncertain | None,
        make: Callable[[bool], Awaitable[Output]],
    ) -> Output:
        """As the ledger of a durable run, for the time that this process has the run.

        Nobody can be asked about an uncertain call here: the model is told, unless the policy is
        `fail`.
        """
        fingerprint = call.fingerprint
        before = self._made.get(key)
        known = before[0] if before is not None else self._seen.get(key, fingerprint)
        if known != fingerprint:
            raise CallChanged(call.call_id, "it was made with another tool or other arguments")
        if before is not None:
            return before[1]
        try:
            output = await make(False)
        except ToolTimeout:
            if on_uncertain == "fail":
                raise
            output = UNCERTAIN
        self._made[key] = fingerprint, output
        return output

    def publish(self, kind: str, agent: str, data: Any = None) -> None:
        if self._publish is not None:
            self._publish(kind, agent, data)


def key_of(path: tuple[str, ...], call_id: str) -> str:
    """The key of a call: different for calls with one id within different enclosing calls."""
    if not path and len(call_id) * 4 <= _MAX_KEY_BYTES:
        return call_id
    key = "/".join((*path, call_id))
    spelled = key.encode("utf-8", "surrogatepass")
    return key if len(spelled) <= _MAX_KEY_BYTES else sha256(spelled).hexdigest()
