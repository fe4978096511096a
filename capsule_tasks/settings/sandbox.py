"""The confinement of a child that runs untrusted code, and its resource limits."""

from typing import Annotated, Literal, Self

from msgspec import Meta
from msgspec.structs import asdict

from capsule_tasks.settings.declared import MIB, ByteCount, Count, PositiveSeconds, Settings


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
