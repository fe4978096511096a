"""The settings that a child is sent in `Hello`. `Ready` has them as they were applied.

Among them: the confinement of a child that runs untrusted code, and its resource limits.
"""

from typing import Annotated, Any, ClassVar, Literal, Self

from msgspec import Meta, field
from msgspec.structs import asdict, force_setattr

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

Backpressure = Literal["block", "drop_oldest"]


class ExecutorSettings(Settings, frozen=True, kw_only=True):
    """How the child runs code."""

    max_waiting: Count = 1000
    """Executions that may wait until others have ended; one more is answered `busy`."""
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
    async_threads: PositiveCount = 64
    """Threads of an `async` child for functions that block."""
    log_file: str | None = None
    log_level: Count = 0
    log_color: bool = False
    """Whether the worker colours its log, for such a child: it has no terminal to ask."""


class LimitSettings(Settings, frozen=True, kw_only=True):
    """Resources of one child. None is no limit; for a sandbox it is the default of sandboxes.

    To lift a limit of a sandbox, give a number that is never reached.
    """

    memory_bytes: Annotated[int, Meta(ge=64 * MIB)] | None = None
    """Address space of each process (RLIMIT_AS): past it allocations raise MemoryError. In a
    sandbox also the memory of all its processes together; buffers of the kernel come on top, about
    208 KiB for each descriptor of each process at most."""
    cpu_time_s: PositiveSeconds | None = None
    """CPU time of one execution; past it the execution ends with an error that says so. Processes
    that the code starts are not counted."""
    output_bytes: ByteCount | None = None
    """Output of one execution, by whatever way; past it the execution ends with an error that says
    so."""
    open_files: Annotated[int, Meta(ge=32)] | None = None
    """Descriptors of each process (RLIMIT_NOFILE)."""
    file_bytes: ByteCount | None = None
    """Size of any file that a process writes (RLIMIT_FSIZE); past it writes raise OSError."""

    def in_sandbox(self, max_disk_bytes: int) -> Self:
        """These limits, with the defaults of sandboxes for those that are not given."""
        defaults = {
            "memory_bytes": 2048 * MIB,
            "cpu_time_s": 300.0,
            "output_bytes": 64 * MIB,
            "open_files": 256,
            "file_bytes": max(1, max_disk_bytes),
        }
        given = {name: value for name, value in asdict(self).items() if value is not None}
        return type(self)(**defaults | given)


class SandboxSettings(Settings, frozen=True, kw_only=True):
    """The confinement of a child that runs untrusted code."""

    network: Literal["none", "open"] = "none"
    """`open` allows every address: also services on this machine, its private network, and the
    metadata service of a cloud, which hands out credentials."""
    isolation: Literal["required", "best_effort"] = "required"
    """`required`: reads, writes, network and signals are confined, or the child does not start."""
    readable: tuple[str, ...] = ()
    """Paths it may read and execute besides the interpreter and its libraries."""
    max_processes: Count = 32
    """Processes below the child; one more ends the execution."""
    max_threads: Annotated[int, Meta(ge=16)] = 512
    """Threads of the child and of the processes below it together; one more ends the execution."""
    max_disk_bytes: Count = 256 * MIB
    """Bytes in its private directory, 4 KiB for each name at least; one more ends the execution."""


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
