"""The settings that a child is sent in `Hello`. `Ready` has them as they were applied."""

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, field
from msgspec.structs import force_setattr

from capsule_tasks.settings.declared import (
    KIB,
    MIB,
    BriefSeconds,
    ByteCount,
    Count,
    PositiveCount,
    PositiveSeconds,
    Relations,
    Settings,
)
from capsule_tasks.settings.sandbox import LimitSettings, SandboxSettings

Backpressure = Literal["block", "drop_oldest"]


class ExecutorSettings(Settings, frozen=True, kw_only=True):
    """How the child runs code."""

    max_waiting: Count = 1000
    """Executions that may wait for their turn; one more is answered `busy`."""
    async_limit: PositiveCount = 1000
    """Coroutine executions that may run at once; one more waits, or is answered `busy`."""
    switch_interval_s: Annotated[float, Meta(ge=1e-6)] = 0.0005
    """`sys.setswitchinterval` of the child: how soon a cancel interrupts a busy loop."""
    unresponsive_loop_s: PositiveSeconds = 0.02
    """How long a cancelled coroutine may keep the event loop before a signal interrupts it."""


class OutputSettings(Settings, frozen=True, kw_only=True):
    """How text travels from `print` to the consumer."""

    backpressure: Backpressure = "block"
    """Backpressure of a full window: `block` the writer, or `drop_oldest` and report a Gap."""
    window_bytes: ByteCount = 1 * MIB
    """Output of one execution that may be on its way and unread; bounds memory on both sides."""
    chunk_bytes: ByteCount = 64 * KIB
    """The most text that travels in one message."""
    flush_interval_s: BriefSeconds = 0.005
    """How long later output may gather before it is sent; the first byte is never delayed."""
    lines_at_once: bool = False
    """Whether a line that follows a pause is sent by the thread that writes it, so that it is not
    lost if the child crashes right after."""


class InputSettings(Settings, frozen=True, kw_only=True):
    """Settings of `input()`."""

    timeout_s: PositiveSeconds | None = None
    """After so long `input()` raises TimeoutError; None waits for as long as it takes."""


class DiagnosticSettings(Settings, frozen=True, kw_only=True):
    """Settings of heartbeats and other reports of a child."""

    heartbeat_interval_s: Annotated[float, Meta(ge=0.01)] = 2.0
    summary_names: Count = 1000
    """The most names a namespace summary lists; the rest is only counted."""
    redact: tuple[str, ...] = ("*password*", "*secret*", "*token*", "*api_key*", "*credential*")
    """Shell patterns (case ignored) of names whose type and size a summary withholds."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "WARNING"
    """Settings of the child's own log, which arrives as output of the session."""


class TaskChildSettings(Settings, frozen=True, kw_only=True):
    """A child that runs the tasks of a Celery app."""

    kind: Literal["blocking", "async"] = "blocking"
    """One task at a time on the main thread, or many `async def` tasks at once."""
    hostname: str = ""
    """The worker's node name."""
    app: str = ""
    """`module:attribute` of the app, for a child that was not forked from the worker."""
    conf: dict[str, Any] = field(default_factory=dict)
    """Settings that were made in the worker's code, for such a child."""
    unsendable: tuple[str, ...] = ()
    """Names of settings whose values cannot be sent: such a child must have them of its own."""
    tasks: tuple[str, ...] = ()
    """Tasks that such a child must find registered once it has imported the app."""
    is_reloaded: bool = False
    """The worker's pool was restarted: tasks that are missing now have left the code."""
    async_limit: PositiveCount = 1000
    """Coroutines of an `async` child at once."""
    log_file: str | None = None
    log_level: Count = 0
    log_color: bool = False
    """Whether the worker colours its log, for such a child: it has no terminal to ask."""


class ChildSettings(Settings, frozen=True, kw_only=True):
    """Everything that a child is sent."""

    executor: ExecutorSettings = ExecutorSettings()
    output: OutputSettings = OutputSettings()
    input: InputSettings = InputSettings()
    limits: LimitSettings = LimitSettings()
    diagnostics: DiagnosticSettings = DiagnosticSettings()
    sandbox: SandboxSettings | None = None
    """Confine the child; None trusts it like the process that starts it."""
    tasks: TaskChildSettings | None = None
    """Run the tasks of a Celery app; None runs source code."""
    max_frame_bytes: Annotated[int, Meta(ge=64 * KIB, le=2**32 - 1)] = 64 * MIB
    """The ceiling of one frame, checked when writing and when reading. Its upper limit is what the
    length in front of a frame can say."""

    _relations: ClassVar[Relations] = (("output.chunk_bytes", "<=", "max_chunk_bytes"),)

    @property
    def max_chunk_bytes(self) -> int:
        """The text that always fits into a frame: four bytes a character, and the message."""
        return self.max_frame_bytes // 5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sandbox is not None:
            force_setattr(self, "limits", self.limits.in_sandbox(self.sandbox.max_disk_bytes))
