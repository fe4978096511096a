"""Every key in Redis is spelled here.

The keys of one script share a hash tag, in braces, and so a slot of a cluster. An id is escaped
byte by byte: no two ids have the same spelling, and none can end a tag or add a part.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import quote

from capsule_tasks.errors import InvalidId, InvalidSetting

MAX_ID_BYTES = 512
_SAFE = "@+=,/"
_PREFIX = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


def escaped(what: str, value: Any) -> str:
    """The id as it is spelled in a key; refuses what is not text, empty, or over 512 bytes."""
    if not isinstance(value, str):
        raise InvalidId(what, value, f"must be text, and is of type {type(value).__name__}")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise InvalidId(what, value, "cannot be written as UTF-8") from None
    if not value:
        raise InvalidId(what, value, "must not be empty")
    if size > MAX_ID_BYTES:
        raise InvalidId(what, value, f"has {size} bytes; at most {MAX_ID_BYTES} are possible")
    return quote(value, safe=_SAFE)


def checked_prefix(prefix: Any) -> str:
    if not isinstance(prefix, str) or not _PREFIX.fullmatch(prefix):
        must = "1 to 128 letters, digits, or one of _ . : / -"
        raise InvalidSetting("prefix", prefix, must)
    checked: str = prefix
    return checked


class SessionKeys:
    """The keys of one named session, all in one slot."""

    def __init__(self, session_id: str, prefix: str = "capsule") -> None:
        self._root = f"{checked_prefix(prefix)}:{{S:{escaped('session id', session_id)}}}"
        self.items = f"{self._root}:items"
        self.history = f"{self._root}:history"
        self.operations = f"{self._root}:operations"
        self.quarantine = f"{self._root}:quarantine"
        self.popped = f"{self._root}:popped"

    def popped_by(self, operation_id: str) -> str:
        """The key of the record that a pop took; the id of the operation comes with its kind."""
        return f"{self.popped}:{quote(operation_id, safe=_SAFE)}"

    def staging(self, operation_id: str) -> str:
        return f"{self._root}:staging:{escaped('operation id', operation_id)}"


class NamedSessionKeys(SessionKeys):
    """The record of one named session, its call log, and what its owner is asked."""

    def __init__(self, session_id: str, prefix: str = "capsule") -> None:
        super().__init__(session_id, prefix)
        self.session = f"{self._root}:session"
        self.calls = f"{self._root}:calls"
        self.known = f"{self._root}:known"
        self.requests = f"{self._root}:requests"
        self.channel = f"{self._root}:changed"

    def reply(self, request_id: str) -> str:
        return f"{self._root}:reply:{escaped('request id', request_id)}"

    def checkpoint(self, generation: str) -> str:
        return f"{self._root}:checkpoint:{escaped('generation', generation)}"


class WantedKeys:
    """The sessions of a profile that wait for an owner, and the channel that rings for them."""

    def __init__(self, profile: str, prefix: str = "capsule") -> None:
        self.wanted = f"{checked_prefix(prefix)}:{{wanted:{escaped('profile', profile)}}}"
        self.marks = f"{self.wanted}:marks"
        self.channel = f"{self.wanted}:changed"


class SessionIndexKeys:
    """The index of named sessions by the time when they were last recorded."""

    def __init__(self, prefix: str = "capsule") -> None:
        root = f"{checked_prefix(prefix)}:{{sessions}}"
        self.order = f"{root}:order"
        self.entries = f"{root}:entries"


class TenantKeys:
    """The keys of one tenant: its sessions, those that are live, and what they used."""

    def __init__(self, tenant: str, prefix: str = "capsule") -> None:
        root = f"{checked_prefix(prefix)}:{{T:{escaped('tenant', tenant)}}}"
        self.live = f"{root}:live"
        self.sessions = f"{root}:sessions"
        self.usage = f"{root}:usage"
        self.operations = f"{root}:operations"


class RunKeys(SessionKeys):
    """The keys of one run, in the slot of its session, so that both change in one step."""

    def __init__(self, session_id: str, run_id: str, prefix: str = "capsule") -> None:
        super().__init__(session_id, prefix)
        self.run = f"{self._root}:run:{escaped('run id', run_id)}"
        self.ledger = f"{self.run}:ledger"
        self.journal = f"{self.run}:journal"
        self.channel = f"{self.run}:changed"


def run_location(run_id: str, prefix: str = "capsule") -> str:
    """The key of the session in which a run lives."""
    return f"{checked_prefix(prefix)}:{{R:{escaped('run id', run_id)}}}"


def run_owners(prefix: str = "capsule") -> str:
    """The key of the index of incarnations that may hold runs."""
    return f"{checked_prefix(prefix)}:{{runs}}:owners"


def _order(root: str, agent: str | None, kind: str, value: str | None) -> str:
    """The order of an index with the entries of this agent, of this value, of both, or all."""
    match agent, value:
        case None, None:
            return f"{root}:all"
        case None, str():
            return f"{root}:{kind}:{quote(value, safe='')}"
        case str(), None:
            return f"{root}:agent:{quote(agent, safe='')}"
    return f"{root}:both:{quote(agent or '', safe='')}:{quote(value or '', safe='')}"


class ApprovalKeys:
    """The index of calls that wait for a decision, all in one slot."""

    def __init__(self, prefix: str = "capsule") -> None:
        self._root = f"{checked_prefix(prefix)}:{{approvals}}"
        self.all = f"{self._root}:all"
        self.due = f"{self._root}:due"
        self.entries = f"{self._root}:entries"
        self.channel = f"{prefix}:approvals"

    def order(self, agent: str | None, tool: str | None) -> str:
        """The order that holds the calls of this agent, or this tool, or both, or all."""
        return _order(self._root, agent, "tool", tool)


class CallKeys(ApprovalKeys):
    """The keys of the index that have a call of one tool by one agent."""

    def __init__(self, agent: str, tool: str, prefix: str = "capsule") -> None:
        super().__init__(prefix)
        self.agent = self.order(agent, None)
        self.tool = self.order(None, tool)
        self.both = self.order(agent, tool)


class RunIndexKeys:
    """The index of runs by agent and status, all in one slot."""

    def __init__(self, prefix: str = "capsule") -> None:
        self._root = f"{checked_prefix(prefix)}:{{runs}}"
        self.all = f"{self._root}:all"
        self.unsent = f"{self._root}:unsent"
        self.entries = f"{self._root}:entries"

    def order(self, agent: str | None, status: str | None) -> str:
        """The order that holds the runs of this agent, or with this status, or both, or all."""
        return _order(self._root, agent, "status", status)

    def order_of_session(self, session_id: str) -> str:
        """The order that holds the runs of a session."""
        return f"{self._root}:session:{quote(session_id, safe='')}"


class RunEntryKeys(RunIndexKeys):
    """The keys of the index that have a run of one agent and session with one status."""

    def __init__(self, agent: str, status: str, session_id: str, prefix: str = "capsule") -> None:
        super().__init__(prefix)
        self.session = self.order_of_session(session_id)
        self.agent = self.order(agent, None)
        self.status = self.order(None, status)
        self.both = self.order(agent, status)


class WorkerKeys:
    """The lease of one incarnation of a worker, and the executions that it holds."""

    def __init__(self, incarnation: str, prefix: str = "capsule") -> None:
        self.worker = f"{checked_prefix(prefix)}:{{W:{escaped('incarnation', incarnation)}}}"
        self.operations = f"{self.worker}:operations"
        self.held = f"{self.worker}:held"


class HostKeys(WorkerKeys):
    """The named sessions that one incarnation of a worker holds, and its doorbell for them."""

    def __init__(self, incarnation: str, prefix: str = "capsule") -> None:
        super().__init__(incarnation, prefix)
        self.sessions = f"{self.worker}:sessions"
        self.channel = f"{doorbell_prefix(prefix)}{incarnation}:sessions"
        self.requests_channel = f"{doorbell_prefix(prefix)}{incarnation}:requests"


class OwnerKeys(WorkerKeys):
    """The runs that one incarnation of a worker holds."""

    def __init__(self, incarnation: str, prefix: str = "capsule") -> None:
        super().__init__(incarnation, prefix)
        self.runs = f"{self.worker}:runs"


class StepKeys:
    """The ledger of an execution's steps."""

    def __init__(self, execution_id: str, prefix: str = "capsule") -> None:
        root = f"{checked_prefix(prefix)}:{{E:{escaped('execution id', execution_id)}}}"
        self.steps = f"{root}:steps"
        self.operations = f"{root}:operations"


class ExecutionKeys:
    """The keys of one execution, all in one slot, and the channel of its changes."""

    __slots__ = ("channel", "control", "events", "meta")

    def __init__(self, execution_id: str, prefix: str = "capsule") -> None:
        root = f"{checked_prefix(prefix)}:{{E:{escaped('execution id', execution_id)}}}"
        self.events = f"{root}:events"
        self.control = f"{root}:control"
        self.meta = f"{root}:meta"
        self.channel = f"{root}:changed"


def doorbell_prefix(prefix: str = "capsule") -> str:
    """The channel of a worker's doorbell without its incarnation, which follows."""
    return f"{checked_prefix(prefix)}:doorbell:"


def worker_index(prefix: str = "capsule") -> str:
    """The index of incarnations that may hold executions."""
    return f"{checked_prefix(prefix)}:workers"


class RecentKeys:
    """The index of executions by time, and the channel that rings when it changes."""

    def __init__(self, prefix: str = "capsule") -> None:
        root = f"{checked_prefix(prefix)}:{{recent}}"
        self.order = f"{root}:order"
        self.entries = f"{root}:entries"
        self.channel = f"{root}:changed"


class GroupKeys:
    """The counter of a group of executions, all in one slot."""

    def __init__(self, group_id: str, prefix: str = "capsule") -> None:
        root = f"{checked_prefix(prefix)}:{{G:{escaped('group id', group_id)}}}"
        self.counts = f"{root}:counts"
        self.failures = f"{root}:failures"
        self.seen = f"{root}:seen"
        self.channel = f"{root}:changed"


class RevokeKeys:
    """Recent revokes, and the channel on which new ones are announced."""

    __slots__ = ("channel", "revokes")

    def __init__(self, prefix: str = "capsule") -> None:
        self.revokes = f"{checked_prefix(prefix)}:{{revokes}}"
        self.channel = f"{self.revokes}:changed"


def losses_key(execution_id: str, attempt: str, prefix: str = "capsule") -> str:
    """The child processes that a task message has cost."""
    root = f"{checked_prefix(prefix)}:{{E:{escaped('execution id', execution_id)}}}"
    return f"{root}:losses:{escaped('attempt', attempt)}"


def renewal_marks(index: str) -> str:
    """Next to kombu's index of unacknowledged messages: those whose worker renews them."""
    return f"{index}.renewed"
