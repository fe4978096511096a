"""The messages between parent and child, one struct each, with their tag in the field `t`.

Unknown fields are ignored and new fields have defaults, so that neighbouring versions understand
each other; a type that the receiver does not know is answered with `Unsupported`.
"""

from __future__ import annotations

import time
from enum import StrEnum
from typing import Any, Literal, Self

import msgspec

from capsule_tasks.protocol.ids import new_id
from capsule_tasks.settings import ChildSettings

VERSIONS: tuple[int, ...] = (1,)
"""The versions of this code, best first."""
CAPABILITIES = (
    *("ack", "async", "cancel", "checkpoint", "credit", "input", "interrupt", "namespace"),
    *("progress", "run_events", "stack"),
)
"""The abilities of this code; the two sides of a session agree on those that both have."""

Stream = Literal["stdout", "stderr"]


class ErrorKind(StrEnum):
    """Why an execution ended without a result."""

    RAISED = "raised"
    """The code raised."""
    CANCELLED = "cancelled"
    """A cancel stopped the code in order; the namespace is kept."""
    KILLED = "killed"
    """The code did not stop: its child was killed after the grace."""
    TIMEOUT = "timeout"
    """The caller's deadline passed."""
    LIMIT = "limit"
    """The execution used more of a resource than it may."""
    BUSY = "busy"
    """Not accepted: another execution runs, and the caller did not ask to wait."""
    TOO_LARGE = "too_large"
    """The result, or the source, does not fit into a frame."""
    SHUTDOWN = "shutdown"
    """The session was shut down."""
    LOST = "lost"
    """The child died."""
    LOST_WITH_NEIGHBOUR = "lost_with_neighbour"
    """The child was killed because of another execution."""
    INCOMPATIBLE_PROTOCOL = "incompatible_protocol"
    """Parent and child speak no common version."""
    UNCONFINED = "unconfined"
    """The machine cannot confine a sandbox as promised."""


class Message(msgspec.Struct, kw_only=True, tag_field="t", omit_defaults=True):
    """The fields of every message."""

    id: str = msgspec.field(default_factory=new_id)
    timestamp: float = msgspec.field(default_factory=time.monotonic)


class ToChild(Message, kw_only=True):
    """A message from the parent to the child."""


class ToParent(Message, kw_only=True):
    """A message from the child to the parent."""


# --- parent to child, control ------------------------------------------------------------------


class Hello(ToChild, kw_only=True, tag="hello"):
    """The first message: the versions of the parent, and the settings of the child."""

    versions: tuple[int, ...]
    session_id: str
    capabilities: tuple[str, ...] = ()
    config: ChildSettings = ChildSettings()


class Cancel(ToChild, kw_only=True, tag="cancel"):
    """Stop one execution. `seq` shows whether it has not arrived yet or has ended."""

    execution_id: str
    seq: int
    grace_s: float = 0.5
    credit: int = 0


class Interrupt(ToChild, kw_only=True, tag="interrupt"):
    """Raise KeyboardInterrupt in one execution, or in all that run."""

    execution_id: str | None = None


class SoftLimit(ToChild, kw_only=True, tag="soft_limit"):
    """Raise the soft time limit in one execution, which may go on."""

    execution_id: str
    seq: int


class StackRequest(ToChild, kw_only=True, tag="stack_request"):
    """Ask for the Python stacks of one execution, or of the whole child."""

    execution_id: str | None = None


class NamespaceRequest(ToChild, kw_only=True, tag="namespace_request"):
    """Ask for the names, types and sizes in the namespace."""


class Credit(ToChild, kw_only=True, tag="credit"):
    """Allow so many more bytes of an execution's output."""

    execution_id: str | None
    bytes: int


class Shutdown(ToChild, kw_only=True, tag="shutdown"):
    """Stop everything and exit. `credit` is for the final output of each execution."""

    reason: str = ""
    credit: int = 0


# --- parent to child, bulk ---------------------------------------------------------------------


class Code(msgspec.Struct, tag="code", tag_field="t", kw_only=True, omit_defaults=True):
    """Source code, run with the semantics of a REPL cell."""

    source: str
    filename: str | None = None


class TaskCall(msgspec.Struct, tag="task", tag_field="t", kw_only=True, omit_defaults=True):
    """A task message of Celery. Its body travels as the producer wrote it."""

    name: str
    task_id: str
    body: bytes
    is_text: bool = False
    """The body came as text, and is UTF-8 here."""
    request: dict[str, Any] = {}
    content_type: str | None = None
    content_encoding: str | None = None
    protocol: Literal[1, 2] = 2
    """Celery's task protocol."""


class Execute(ToChild, kw_only=True, tag="execute"):
    """Run code or a task. `seq` counts the executions of a session."""

    execution_id: str
    seq: int
    payload: Code | TaskCall
    on_busy: Literal["refuse", "wait"] = "refuse"


class InputResponse(ToChild, kw_only=True, tag="input_response"):
    """Answer an InputRequest, or end its input."""

    execution_id: str
    request_id: str
    text: str = ""
    eof: bool = False


class Checkpoint(ToChild, kw_only=True, tag="checkpoint"):
    """Save the namespace."""

    max_bytes: int
    """A checkpoint that would have more is an error."""


class RestorePiece(ToChild, kw_only=True, tag="restore_piece"):
    """Bytes of a saved namespace that a Restore is about to name; in order."""

    restore_id: str
    data: bytes


class Restore(ToChild, kw_only=True, tag="restore"):
    """Restore a saved namespace, over the present one or instead of it. Its pieces came before."""

    size: int
    """Bytes of all pieces together."""
    mode: Literal["merge", "replace"] = "merge"


# --- child to parent, control ------------------------------------------------------------------


class Ready(ToParent, kw_only=True, tag="ready"):
    """The child accepts executions; `config` has the settings that it applied."""

    session_id: str
    version: int
    pid: int
    capabilities: tuple[str, ...] = ()
    config: ChildSettings = ChildSettings()
    python: str = ""
    isolation: tuple[str, ...] = ()
    """The confinement that was applied to the child."""


class Rejected(ToParent, kw_only=True, tag="rejected"):
    """The handshake failed; the child exits."""

    kind: str
    message: str


class Ack(ToParent, kw_only=True, tag="ack"):
    """An execution was accepted and will end with exactly one terminal message."""

    ack_of: str
    execution_id: str
    accepted_at: float
    queued: bool = False
    """Other executions are there: `Started` follows when this one starts."""
    seq: int | None = None
    """The `seq` of the `Execute`: an id may be reused, and the end may come before this."""


class Started(ToParent, kw_only=True, tag="started"):
    """A queued execution has started. For the parent only, which finds the owner of raw output."""

    execution_id: str
    seq: int | None = None
    """The `seq` of the `Execute`."""


class Reply(ToParent, kw_only=True):
    """The answer to a request, which `in_reply_to` names."""

    in_reply_to: str


class CancelReply(Reply, kw_only=True, tag="cancel_reply"):
    """The answer to a Cancel."""

    execution_id: str
    done: Literal["interrupted", "not_running"]


class InterruptReply(Reply, kw_only=True, tag="interrupt_reply"):
    """The answer to an Interrupt, with the executions that were interrupted."""

    done: Literal["interrupted", "not_running"]
    execution_ids: tuple[str, ...] = ()


class Frame(msgspec.Struct, array_like=True):
    """One line of a stack, without values."""

    file: str
    line: int
    function: str


class Stack(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The stack of one thread or task, outermost frame first."""

    name: str
    kind: Literal["thread", "task"]
    frames: list[Frame]
    execution_id: str | None = None


class StackReply(Reply, kw_only=True, tag="stack_reply"):
    """The stacks asked for."""

    stacks: list[Stack]


class NamespaceEntry(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A name with its type and size; both are withheld when it matches a redaction pattern."""

    name: str
    type_name: str = ""
    size: int = 0
    redacted: bool = False


class NamespaceSummary(Reply, kw_only=True, tag="namespace_summary"):
    """The names in the namespace; `total` counts also those that are not listed."""

    total: int
    entries: list[NamespaceEntry]


class Heartbeat(ToParent, kw_only=True, tag="heartbeat"):
    """Sent by the control thread; shows that the interpreter runs."""

    rss_bytes: int
    cpu_s: float
    namespace_size: int
    running: tuple[str, ...] = ()
    waiting: int = 0
    output_backlog_bytes: int = 0
    threads: int = 0


class Unsupported(ToChild, ToParent, kw_only=True, tag="unsupported"):
    """A message of an unknown type was ignored."""

    what: str
    in_reply_to: str | None = None


class ReplyTooLarge(Reply, kw_only=True, tag="reply_too_large"):
    """A request was understood, but its reply does not fit into a frame; the request failed."""

    size: int
    ceiling: int


# --- child to parent, bulk ---------------------------------------------------------------------


class Output(ToParent, kw_only=True, tag="output"):
    """Text that an execution wrote; without an id it belongs to the session."""

    stream: Stream
    data: str
    execution_id: str | None = None
    late: bool = False
    """Written after the end of the execution: output of the session, with the old id."""
    raw: bool = False
    """Raw output, which the parent read from descriptor 1 or 2."""


class Progress(ToParent, kw_only=True, tag="progress"):
    """The progress that an execution reports."""

    execution_id: str
    done: float
    total: float | None = None
    note: str = ""


class RunEvent(ToParent, kw_only=True, tag="run_event"):
    """Something that people who watch a run want to see; after a crash, events may come again."""

    kind: str
    agent: str = ""
    json: bytes
    """The data of the event."""
    left_out_bytes: int = 0
    """The size of data that is too large for an event."""
    dropped_events: int = 0
    """Events of the run that were dropped before this one, as nobody took them in time."""
    execution_id: str = ""

    @classmethod
    def of(cls, kind: str, agent: str = "", data: Any = None) -> Self:
        return cls(kind=kind, agent=agent, json=msgspec.json.encode(data))

    @property
    def data(self) -> Any:
        """The value in `json`, decoded each time."""
        return msgspec.json.decode(self.json)


class InputRequest(ToParent, kw_only=True, tag="input_request"):
    """An execution waits for a line of text; the message's id names the request."""

    execution_id: str
    prompt: str = ""
    password: bool = False
    timeout_s: float | None = None


class InputClosed(ToParent, kw_only=True, tag="input_closed"):
    """An execution no longer waits for input."""

    execution_id: str
    request_id: str
    reason: Literal["answered", "timeout", "cancelled", "eof"]


class Gap(ToParent, kw_only=True, tag="gap"):
    """Output is missing here."""

    stream: Stream
    lost_bytes: int
    lost_messages: int
    execution_id: str | None = None


Streamed = Output | Progress | RunEvent | Gap
"""Messages that a child sends while code runs and the parent hands on as they are: also events."""


class Raised(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Enough of an exception to rebuild it where its type is known."""

    module: str
    name: str
    """The qualified name of the type in that module."""
    args: list[Any] | None = None
    """None if an argument cannot be carried."""
    message: str = ""
    text: str = ""
    """The `repr` of the exception."""
    notes: tuple[str, ...] = ()
    state: dict[str, Any] = {}
    """Attributes that Celery reads: `when` of a retry, `requeue` of a reject."""


class Failure(Raised, kw_only=True, omit_defaults=True):
    """How a task failed, or why it is to be retried, ignored or rejected."""

    traceback: str = ""
    internal: bool = False
    """Celery's own code raised the exception, not the task."""
    inner: Raised | None = None
    """The exception that a retry was raised for."""


class Terminal(ToParent, kw_only=True):
    """The last message of an execution, with the bytes that each stream carried before it."""

    execution_id: str
    stdout_bytes: int = 0
    stderr_bytes: int = 0


class Result(Terminal, kw_only=True, tag="result"):
    """An execution succeeded. A value that cannot be carried arrives as its repr, with a mark."""

    value: Any = None
    is_repr: bool = False
    type_name: str = "NoneType"


class TaskResult(Terminal, kw_only=True, tag="task_result"):
    """Celery's tracer ran a task to its end; the value is in the result backend."""

    text: str | None = None
    """A shortened `repr` of the value, for events and logs."""
    runtime_s: float | None = None
    failure: Failure | None = None
    """Also for a retry, an ignore and a reject."""
    escaped_tracer: bool = False
    """The tracer did not handle the failure (a `SystemExit`, say): the backend has no result."""
    has_unread_raw: bool = True
    """Bytes may wait in the pipes of descriptors 1 and 2: read them before this."""


class Error(Terminal, kw_only=True, tag="error"):
    """An execution ended without a result; `kind` is an ErrorKind."""

    kind: str
    type: str
    message: str
    traceback: str = ""
    notes: tuple[str, ...] = ()
    stack: str = ""
    """The last known stack of an execution that was killed or stopped at a limit."""


class CheckpointPiece(ToParent, kw_only=True, tag="checkpoint_piece"):
    """Bytes of a namespace that is being saved. Offset 0 begins, or begins again."""

    checkpoint_id: str
    offset: int
    data: bytes


class Checkpointed(Reply, kw_only=True, tag="checkpointed"):
    """A namespace was saved, and its pieces were sent; else `error` says why not."""

    size: int = 0
    saved: tuple[str, ...] = ()
    skipped: dict[str, str] = {}
    python: str = ""
    packages: dict[str, str] = {}
    error: str = ""


class Restored(Reply, kw_only=True, tag="restored"):
    """A namespace was restored. With an error it has not changed."""

    names: tuple[str, ...] = ()
    lost: dict[str, str] = {}
    """Names that could not come back, each with the reason."""
    differences: dict[str, str] = {}
    """Packages, and `python`, whose versions differ, each with both versions."""
    error: str = ""
