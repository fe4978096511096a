"""Every knob of the package, typed and validated; bad values are refused with their name."""

from __future__ import annotations

import os
import sys
from typing import Any, Literal, NoReturn

import msgspec

from capsule_tasks.errors import InvalidSetting

KIB = 1024
MIB = 1024 * KIB

_MOST_SECONDS = 10**9
"""Three decades; beyond three centuries the system's own timers give up."""
_MOST = 2**63 - 1
_MOST_FRAME_BYTES = 2**32 - 1
"""What the length in front of a frame can say."""

Backpressure = Literal["block", "drop_oldest"]


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """A group of settings that refuses values of another type or out of range."""

    def _at_least(self, minimum: float, *names: str) -> None:
        """Seconds may have fractions; what is counted may not."""
        for name in names:
            value = getattr(self, name)
            in_seconds = name.endswith("_s")
            most = _MOST_SECONDS if in_seconds else _MOST
            is_number = isinstance(value, (int, float) if in_seconds else int)
            if not is_number or isinstance(value, bool) or not minimum <= value <= most:
                what = "number of seconds" if in_seconds else "whole number"
                self._refuse(name, f"a {what} from {minimum} to {most}")

    def _optional_at_least(self, minimum: float, *names: str) -> None:
        self._at_least(minimum, *self._given(*names))

    def _one_of(self, name: str, allowed: tuple[str, ...]) -> None:
        if getattr(self, name) not in allowed:
            self._refuse(name, "one of " + ", ".join(map(repr, allowed)))

    def _of_type(self, kind: type, *names: str) -> None:
        for name in names:
            if not isinstance(getattr(self, name), kind):
                self._refuse(name, f"of type {kind.__name__}")

    def _tuple_of(self, kind: type, *names: str) -> None:
        self._of_type(tuple, *names)
        for name in names:
            if not all(type(item) is kind for item in getattr(self, name)):
                self._refuse(name, f"a tuple of {kind.__name__}")

    def _given(self, *names: str) -> list[str]:
        """Those that are not None."""
        return [name for name in names if getattr(self, name) is not None]

    def _refuse(self, name: str, must: str) -> NoReturn:
        raise InvalidSetting(f"{type(self).__name__}.{name}", getattr(self, name), must)


class ExecutorSettings(_Section, frozen=True, kw_only=True):
    """How the child runs code."""

    max_waiting: int = 1000
    """Executions that may wait for their turn; one more is answered `busy`."""
    async_limit: int = 1000
    """Coroutine executions that may run at once; one more waits, or is answered `busy`."""
    switch_interval_s: float = 0.0005
    """`sys.setswitchinterval` of the child: how soon a cancel interrupts a busy loop."""
    unresponsive_loop_s: float = 0.02
    """How long a cancelled coroutine may keep the event loop before a signal interrupts it."""

    def __post_init__(self) -> None:
        self._at_least(0, "max_waiting")
        self._at_least(1, "async_limit")
        self._at_least(1e-6, "switch_interval_s")
        self._at_least(0.001, "unresponsive_loop_s")


class OutputSettings(_Section, frozen=True, kw_only=True):
    """How text travels from `print` to the consumer."""

    backpressure: Backpressure = "block"
    """What a full window does to the writer: `block` it, or `drop_oldest` and say so."""
    window_bytes: int = 1 * MIB
    """Output of one execution that may be on its way and unread; bounds memory on both sides."""
    chunk_bytes: int = 64 * KIB
    """The most text that travels in one message."""
    flush_interval_s: float = 0.005
    """How long later output may gather before it is sent; the first byte is never delayed."""
    lines_at_once: bool = False
    """Whether its writer sends a line after a rest, so that a crash right behind finds it gone."""

    def __post_init__(self) -> None:
        self._one_of("backpressure", ("block", "drop_oldest"))
        self._at_least(1, "window_bytes", "chunk_bytes")
        self._at_least(0.0001, "flush_interval_s")
        self._of_type(bool, "lines_at_once")


class InputSettings(_Section, frozen=True, kw_only=True):
    """What `input()` does while nobody answers."""

    timeout_s: float | None = None
    """After so long `input()` raises TimeoutError; None waits for as long as it takes."""

    def __post_init__(self) -> None:
        self._optional_at_least(0.001, "timeout_s")


class LimitSettings(_Section, frozen=True, kw_only=True):
    """Resources of one child. None is no limit; for a sandbox it is the default of sandboxes.

    To lift a limit of a sandbox, give a number that is never reached.
    """

    memory_bytes: int | None = None
    """Address space of each process (RLIMIT_AS): past it allocations raise MemoryError. In a
    sandbox also the memory of all its processes together; buffers of the kernel come on top, about
    208 KiB for each descriptor of each process at most."""
    cpu_time_s: float | None = None
    """CPU time of one execution; past it the execution ends with an error that says so. Processes
    that the code starts are not counted."""
    output_bytes: int | None = None
    """Output of one execution, by whatever way; past it the execution ends with an error that says
    so."""
    open_files: int | None = None
    """Descriptors of each process (RLIMIT_NOFILE)."""
    file_bytes: int | None = None
    """Size of any file that a process writes (RLIMIT_FSIZE); past it writes raise OSError."""

    def __post_init__(self) -> None:
        self._optional_at_least(64 * MIB, "memory_bytes")
        self._optional_at_least(0.001, "cpu_time_s")
        self._optional_at_least(1, "output_bytes", "file_bytes")
        self._optional_at_least(32, "open_files")

    def in_sandbox(self, max_disk_bytes: int) -> LimitSettings:
        """These limits, with the defaults of sandboxes for those that are not given."""
        defaults = {
            "memory_bytes": 2048 * MIB,
            "cpu_time_s": 300.0,
            "output_bytes": 64 * MIB,
            "open_files": 256,
            "file_bytes": max(1, max_disk_bytes),
        }
        given = {name: getattr(self, name) for name in self._given(*defaults)}
        return LimitSettings(**defaults | given)


class DiagnosticSettings(_Section, frozen=True, kw_only=True):
    """What a session reports of itself."""

    heartbeat_interval_s: float = 2.0
    summary_names: int = 1000
    """The most names a namespace summary lists; the rest is only counted."""
    redact: tuple[str, ...] = ("*password*", "*secret*", "*token*", "*api_key*", "*credential*")
    """Shell patterns (case ignored) of names whose type and size a summary withholds."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "WARNING"
    """What the child writes to its own log, which arrives as session output."""

    def __post_init__(self) -> None:
        self._at_least(0.01, "heartbeat_interval_s")
        self._at_least(0, "summary_names")
        self._tuple_of(str, "redact")
        self._one_of("log_level", ("DEBUG", "INFO", "WARNING", "ERROR"))


class SandboxSettings(_Section, frozen=True, kw_only=True):
    """What confines a child that runs code of strangers."""

    network: Literal["none", "open"] = "none"
    """`open` allows every address: also what listens on this machine, its private network, and the
    metadata service of a cloud, which hands out credentials."""
    isolation: Literal["required", "best_effort"] = "required"
    """`required`: reads, writes, network and signals are confined, or the child does not start."""
    readable: tuple[str, ...] = ()
    """Paths it may read and execute besides the interpreter and its libraries."""
    max_processes: int = 32
    """Processes below the child; one more ends the execution."""
    max_threads: int = 512
    """Threads of the child and of the processes below it together; one more ends the execution."""
    max_disk_bytes: int = 256 * MIB
    """Bytes in its private directory, 4 KiB for each name at least; one more ends the execution."""

    def __post_init__(self) -> None:
        self._one_of("network", ("none", "open"))
        self._one_of("isolation", ("required", "best_effort"))
        self._tuple_of(str, "readable")
        self._at_least(0, "max_processes", "max_disk_bytes")
        self._at_least(16, "max_threads")


class TaskChildSettings(_Section, frozen=True, kw_only=True):
    """A child that runs the tasks of a Celery app."""

    kind: Literal["blocking", "async"] = "blocking"
    """One task at a time on the main thread, or `async def` tasks beside each other."""
    hostname: str = ""
    """The worker's node name."""
    app: str = ""
    """`module:attribute` of the app, for a child that was not forked from the worker."""
    conf: dict[str, Any] = {}
    """Settings that were made in the worker's code, for such a child."""
    unsendable: tuple[str, ...] = ()
    """Names of others, whose values cannot travel: such a child must have them of its own."""
    tasks: tuple[str, ...] = ()
    """Tasks that such a child must find registered once it has imported the app."""
    is_reloaded: bool = False
    """The worker's pool was restarted: tasks that are missing now have left the code."""
    async_limit: int = 1000
    """Coroutines of an `async` child at once."""
    log_file: str | None = None
    log_level: int = 0
    log_color: bool = False
    """Whether the worker colours its log, for such a child: it has no terminal to ask."""

    def __post_init__(self) -> None:
        self._one_of("kind", ("blocking", "async"))
        self._of_type(str, "hostname", "app", *self._given("log_file"))
        self._of_type(dict, "conf")
        if not all(type(name) is str for name in self.conf):
            self._refuse("conf", "a dict with names of settings")
        self._tuple_of(str, "tasks", "unsendable")
        self._of_type(bool, "is_reloaded", "log_color")
        self._at_least(1, "async_limit")
        self._at_least(0, "log_level")


class ChildSettings(_Section, frozen=True, kw_only=True):
    """Everything the child is told, in `Hello`; it comes back, as applied, in `Ready`."""

    executor: ExecutorSettings = ExecutorSettings()
    output: OutputSettings = OutputSettings()
    input: InputSettings = InputSettings()
    limits: LimitSettings = LimitSettings()
    diagnostics: DiagnosticSettings = DiagnosticSettings()
    sandbox: SandboxSettings | None = None
    """Confine the child; None trusts it like the process that starts it."""
    tasks: TaskChildSettings | None = None
    """Run the tasks of a Celery app; None runs source code."""
    max_frame_bytes: int = 64 * MIB
    """The ceiling of one frame, checked when writing and when reading."""

    def __post_init__(self) -> None:
        self._of_type(ExecutorSettings, "executor")
        self._of_type(OutputSettings, "output")
        self._of_type(InputSettings, "input")
        self._of_type(LimitSettings, "limits")
        self._of_type(DiagnosticSettings, "diagnostics")
        self._of_type(SandboxSettings, *self._given("sandbox"))
        self._of_type(TaskChildSettings, *self._given("tasks"))
        if self.sandbox is not None:
            limits = self.limits.in_sandbox(self.sandbox.max_disk_bytes)
            msgspec.structs.force_setattr(self, "limits", limits)
        self._at_least(64 * KIB, "max_frame_bytes")
        if self.max_frame_bytes > _MOST_FRAME_BYTES:
            self._refuse("max_frame_bytes", f"<= {_MOST_FRAME_BYTES}")
        if self.output.chunk_bytes * 5 > self.max_frame_bytes:
            raise InvalidSetting(
                "OutputSettings.chunk_bytes",
                self.output.chunk_bytes,
                f"at most a fifth of max_frame_bytes ({self.max_frame_bytes})",
            )


class TimeoutSettings(_Section, frozen=True, kw_only=True):
    """Deadlines the parent holds; all of them are measured on the monotonic clock."""

    ready_s: float = 10.0
    """From spawn to `Ready`."""
    warmup_s: float = 60.0
    """For the warmup code."""
    shutdown_s: float = 5.0
    """From `Shutdown` to the child's exit; after it the child is killed."""
    grace_s: float = 0.5
    """From a cancel to the kill, where the caller names no other."""
    drain_s: float = 5.0
    """For the neighbours of a coroutine that will not stop, before their child is killed."""
    stack_s: float = 0.2
    """For the stacks of a child that is about to be cancelled or killed."""
    idle_s: float = 1.0
    """READY for so long is IDLE."""
    unresponsive_s: float = 10.0
    """Silence of the heartbeat after which the session is reported unresponsive; several times
    `heartbeat_interval_s`."""

    def __post_init__(self) -> None:
        self._at_least(0.001, "ready_s", "warmup_s", "shutdown_s", "idle_s", "unresponsive_s")
        self._at_least(0, "grace_s", "drain_s", "stack_s")


class RoutingSettings(_Section, frozen=True, kw_only=True):
    """How the parent shares its attention between control messages and bulk."""

    control_weight: int = 64
    bulk_weight: int = 16
    """Messages of each kind handled in one turn while both are waiting."""
    read_bytes: int = 256 * KIB
    """The most read from one pipe in one turn of the event loop."""
    session_queue: int = 1000
    """Messages of no execution kept for `receive_message`; beyond it the oldest goes."""
    session_queue_bytes: int = 64 * MIB
    """The most bytes in those; beyond it the oldest goes, but never the newest."""
    interceptor_budget_s: float = 0.010
    interceptor_overruns: int = 3
    """After so many calls over budget an interceptor is quarantined."""
    log_output: bool = True
    """Whether output of no execution also goes to the log `capsule_tasks.sessions`."""
    quarantine_queue: int = 1000
    """Messages kept for a quarantined interceptor; beyond it the oldest goes, counted."""
    run_bytes: int = 64 * MIB
    """Output that `run` keeps of one execution; beyond it the oldest goes, counted in `gaps`."""

    def __post_init__(self) -> None:
        self._at_least(1, "control_weight", "bulk_weight", "session_queue", "quarantine_queue")
        self._at_least(1, "interceptor_overruns", "session_queue_bytes", "run_bytes")
        self._of_type(bool, "log_output")
        self._at_least(4 * KIB, "read_bytes")
        self._at_least(0.0001, "interceptor_budget_s")


class SessionConfig(_Section, frozen=True, kw_only=True):
    """One session: what its child is told, and how the parent treats it."""

    child: ChildSettings = ChildSettings()
    timeouts: TimeoutSettings = TimeoutSettings()
    routing: RoutingSettings = RoutingSettings()
    python: str = sys.executable
    """The interpreter of the child; it must be able to import capsule_tasks and msgspec."""
    cwd: str | None = None
    env: dict[str, str] | None = None
    """The child's environment; None hands on the parent's, or nothing of it to a sandbox."""
    warmup: str | None = None
    """Code run once after the handshake; its output goes to the log."""
    enable_metrics: bool = True
    replace_killed: bool = True
    """Whether a session whose child was killed by a cancel or a limit starts a new one itself."""
    protocol_versions: tuple[int, ...] = (1,)
    """Versions offered to the child, best first."""

    def __post_init__(self) -> None:
        self._of_type(ChildSettings, "child")
        self._of_type(TimeoutSettings, "timeouts")
        self._of_type(RoutingSettings, "routing")
        self._of_type(str, "python", *self._given("cwd", "warmup"))
        self._of_type(dict, *self._given("env"))
        self._of_type(bool, "enable_metrics", "replace_killed")
        self._tuple_of(int, "protocol_versions")
        if not all(isinstance(text, str) for pair in (self.env or {}).items() for text in pair):
            self._refuse("env", "a dict of str to str")
        if not self.protocol_versions:
            self._refuse("protocol_versions", "at least one version")
        self._check_heartbeat()
        if self.child.sandbox is not None and self.env is None:
            msgspec.structs.force_setattr(self, "env", scrubbed_environment())

    def _check_heartbeat(self) -> None:
        """Between two heartbeats a healthy child is silent: a pool would replace it for that."""
        interval_s = self.child.diagnostics.heartbeat_interval_s
        if interval_s >= self.timeouts.unresponsive_s:
            raise InvalidSetting(
                "TimeoutSettings.unresponsive_s",
                self.timeouts.unresponsive_s,
                f"more than DiagnosticSettings.heartbeat_interval_s ({interval_s})",
            )


def scrubbed_environment() -> dict[str, str]:
    """An environment that holds no secret of this process."""
    return {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}


class PoolSettings(_Section, frozen=True, kw_only=True):
    """How many sessions a pool keeps, and for how long each is used."""

    min_idle: int = 1
    """Sessions kept ready though nobody asks for them."""
    max_sessions: int = 4
    """Sessions at any moment, those that are being started or ended included."""
    idle_timeout_s: float = 300.0
    """An idle session beyond `min_idle` is ended after so long."""
    fresh: bool = True
    """Whether every borrower gets a session that nobody used before; named ones excepted. False is
    for code whose borrowers may see what others left: no process is started for each of them."""
    max_uses: int | None = None
    max_age_s: float | None = None
    max_growth_bytes: int | None = None
    max_rss_bytes: int | None = None
    """A session is replaced after so many executions (a borrower that runs none counts as one), so
    long, so much growth of its memory, or when it uses more memory than that."""
    breaker_failures: int = 3
    """After so many failed starts in a row waiters are told, instead of kept."""
    breaker_reset_s: float = 5.0
    """After so long one more start is tried."""

    def __post_init__(self) -> None:
        self._at_least(0, "min_idle")
        self._at_least(1, "max_sessions", "breaker_failures")
        self._at_least(0.001, "idle_timeout_s", "breaker_reset_s")
        self._optional_at_least(1, "max_uses", "max_growth_bytes", "max_rss_bytes")
        self._optional_at_least(0.001, "max_age_s")
        self._of_type(bool, "fresh")
        if self.min_idle > self.max_sessions:
            self._refuse("min_idle", f"at most max_sessions ({self.max_sessions})")


class Profile(_Section, frozen=True, kw_only=True):
    """One kind of session that a pool offers: how it is started, configured and kept."""

    session: SessionConfig = SessionConfig()
    pool: PoolSettings = PoolSettings()
    start: Literal["fork", "cold"] = "fork"
    """`fork` copies a template that has imported everything; `cold` starts a fresh interpreter."""
    imports: tuple[str, ...] = ()
    """Modules that the template imports before it is copied."""
    template_timeout_s: float = 60.0
    stop_mode: Literal["kill", "graceful"] = "kill"
    """How an idle session is ended: `ask` lets its exit hooks run, for `shutdown_s` at most."""

    @classmethod
    def app(cls, pool: PoolSettings | None = None, **changes: Any) -> Profile:
        """Trusted code in the environment of this process.

        Its sessions are used again, unless a `pool` is given: that says itself, by `fresh`.
        """
        return cls(pool=pool or PoolSettings(fresh=False), **changes)

    @classmethod
    def sandbox(
        cls,
        sandbox: SandboxSettings | None = None,
        limits: LimitSettings | None = None,
        pool: PoolSettings | None = None,
        **changes: Any,
    ) -> Profile:
        """Code of strangers: confined, without secrets, and a fresh session for every borrower."""
        child = ChildSettings(
            sandbox=sandbox or SandboxSettings(),
            limits=limits or LimitSettings(),
        )
        return cls(
            session=SessionConfig(child=child, env=scrubbed_environment()),
            pool=msgspec.structs.replace(pool or PoolSettings(), fresh=True),
            **changes,
        )

    def __post_init__(self) -> None:
        self._of_type(SessionConfig, "session")
        self._of_type(PoolSettings, "pool")
        self._one_of("start", ("fork", "cold"))
        self._one_of("stop_mode", ("kill", "graceful"))
        self._tuple_of(str, "imports")
        self._at_least(0.001, "template_timeout_s")


class RetrySettings(_Section, frozen=True, kw_only=True):
    """How often a call to Redis is made again when its reply was lost or it was not served."""

    attempts: int = 6
    """Calls in all; 1 never repeats."""
    first_delay_s: float = 0.05
    """The longest pause before the first repeat; it doubles, and each pause is a random part."""
    max_delay_s: float = 2.0

    def __post_init__(self) -> None:
        self._at_least(1, "attempts")
        self._at_least(0, "first_delay_s", "max_delay_s")


class ConnectionSettings(_Section, frozen=True, kw_only=True):
    """How connections to Redis are made and used."""

    connect_timeout_s: float = 5.0
    reply_timeout_s: float = 5.0
    """Silence after which a connection is given up; what was sent may still have been done."""
    max_connections: int = 64
    """Connections of one event loop; further calls wait for their turn."""

    def __post_init__(self) -> None:
        self._at_least(0.001, "connect_timeout_s", "reply_timeout_s")
        self._at_least(1, "max_connections")


class HistorySettings(_Section, frozen=True, kw_only=True):
    """How long a history is kept, and how large it may grow."""

    ttl_s: float = 90 * 86400.0
    """From the last write to the end of the history; every write begins it anew."""
    renew_on_read: bool = False
    """Whether reading begins it anew, too."""
    max_item_bytes: int = 8 * MIB
    max_items: int = 100_000
    max_bytes: int = 256 * MIB
    """Of all items of one history together."""
    max_quarantined: int = 1000
    """Corrupt records kept for inspection; the newest stay."""
    prefix: str = "capsule"
    """What every key begins with."""
    retry: RetrySettings = RetrySettings()

    def __post_init__(self) -> None:
        self._at_least(0.001, "ttl_s")
        self._of_type(bool, "renew_on_read")
        self._at_least(1, "max_item_bytes", "max_items", "max_bytes", "max_quarantined")
        self._of_type(str, "prefix")
        self._of_type(RetrySettings, "retry")


class RunSettings(_Section, frozen=True, kw_only=True):
    """How long runs are kept, and how large what they store may be."""

    ttl_s: float = 30 * 86400.0
    """From the last change of a run that is not over: it may wait for a person so long."""
    ended_ttl_s: float = 7 * 86400.0
    """How long a run can be looked at that its owner ended; one cancelled meanwhile has `ttl_s`."""
    max_snapshot_bytes: int = 16 * MIB
    max_output_bytes: int = 8 * MIB
    """Of one tool call."""
    prefix: str = "capsule"
    retry: RetrySettings = RetrySettings()

    def __post_init__(self) -> None:
        self._at_least(1, "ttl_s", "ended_ttl_s")
        self._at_least(1, "max_snapshot_bytes", "max_output_bytes")
        self._of_type(str, "prefix")
        self._of_type(RetrySettings, "retry")


class LeaseSettings(_Section, frozen=True, kw_only=True):
    """How long a worker is believed to live after it last said so."""

    lease_s: float = 15.0
    lapsed_ttl_s: float = 86400.0
    """How long it is known that a lease has lapsed."""

    def __post_init__(self) -> None:
        self._at_least(0.05, "lease_s")
        self._at_least(1, "lapsed_ttl_s")


class StepSettings(_Section, frozen=True, kw_only=True):
    """How steps of tasks are remembered."""

    ttl_s: float = 7 * 86400.0
    """How long after its last step a task may be delivered again without repeating one."""
    max_output_bytes: int = 8 * MIB
    prefix: str = "capsule"
    retry: RetrySettings = RetrySettings()

    def __post_init__(self) -> None:
        self._at_least(1, "ttl_s", "max_output_bytes")
        self._of_type(str, "prefix")
        self._of_type(RetrySettings, "retry")


class ExecutionSettings(_Section, frozen=True, kw_only=True):
    """How long, and how much of, what executions say is kept."""

    unfinished_ttl_s: float = 7 * 86400.0
    """Nothing of an execution that has not ended is older, counted from the last thing it said."""
    live_bytes: int = 1 * MIB
    """Of the events of one execution while it runs; the oldest are trimmed."""
    retention_bytes: int = 64 * KIB
    """Of them after its end."""
    retention_s: float = 3600.0
    """After the end of an execution that said something."""
    silent_retention_s: float = 30.0
    """After the end of one that said nothing; late watchers are answered by the result backend."""
    control_ttl_s: float = 86400.0
    """How long a command waits for an execution that nobody has begun."""
    recent_max: int = 10_000
    """Executions in the index of recent ones."""
    recent_ttl_s: float = 7 * 86400.0
    group_ttl_s: float = 86400.0
    """After the last end in a group."""
    group_failures: int = 1000
    """Failures of one group that are described; all are counted."""
    hold_ttl_s: float = 8 * 86400.0
    prefix: str = "capsule"
    """What every key begins with."""
    retry: RetrySettings = RetrySettings()

    def __post_init__(self) -> None:
        self._at_least(
            1,
            "unfinished_ttl_s",
            "retention_s",
            "control_ttl_s",
            "recent_ttl_s",
            "group_ttl_s",
            "hold_ttl_s",
        )
        self._at_least(0.1, "silent_retention_s")
        self._at_least(1, "recent_max", "group_failures", "retention_bytes")
        self._at_least(self.retention_bytes, "live_bytes")
        self._of_type(str, "prefix")
        self._of_type(RetrySettings, "retry")


class PublishSettings(_Section, frozen=True, kw_only=True):
    """How a worker passes on what its executions say."""

    window_bytes: int = 1 * MIB
    """Of one execution, waiting for Redis; beyond it the execution loses output, or waits."""
    total_bytes: int = 64 * MIB
    """Of all executions of a worker."""
    event_bytes_max: int = 16 * KIB
    """The largest text of one event."""
    batch_max: int = 64
    """Events of one execution in one call."""
    rate_bytes_per_second: int = 20 * MIB
    """Output of a worker; more starves its other work (of Celery's hub, of other tasks)."""
    claim_wait_s: float = 5.0
    """How long a task waits for a Redis that does not answer, before it begins all the same."""
    end_wait_s: float = 5.0
    """How long Celery waits for a task's last event to be stored."""
    cancel_grace_s: float = 2.0
    """From a cancel that names no grace to the kill."""
    replicas: int = 0
    """So many replicas have a claim, an event, an end before anybody hears that it is stored."""
    replica_wait_s: float = 1.0
    """How long they have; then it counts as stored all the same, with a warning."""

    def __post_init__(self) -> None:
        self._at_least(1024, "window_bytes", "event_bytes_max", "rate_bytes_per_second")
        self._at_least(self.window_bytes, "total_bytes")
        self._at_least(1, "batch_max")
        self._at_least(0, "claim_wait_s", "end_wait_s", "cancel_grace_s", "replicas")
        self._at_least(0.001, "replica_wait_s")


def is_portable_wanted() -> bool:
    """Whether the environment asks to do without what only Linux has; children inherit it."""
    return os.environ.get("CAPSULE_PORTABLE", "") not in ("", "0")


def redis_url_of_environment() -> str | None:
    """The Redis that the environment names for what this package stores."""
    return os.environ.get("CAPSULE_REDIS_URL") or None
