"""Which child has which piece of work. Everything here runs on the runtime's loop.

Work waits in one queue for each kind of child and is sent in order of arrival. `SubPool` decides
how many children there are and which of them takes the next piece. The dispatcher sends the piece,
remembers the child, and tells its listener what becomes of the piece:

    enqueue ──▶ waiting ──sent──▶ with a child ──started──▶ ──finished──▶ (forgotten)
                   ▲                    │
                   └──────refused───────┘
"""

from __future__ import annotations

import signal
from typing import Generic, Literal, Protocol, TypeVar

from capsule_tasks.protocol.messages import Message, TaskCall, Terminal
from capsule_tasks.sessions import SessionPool
from capsule_tasks.sessions.session import Session
from capsule_tasks.sessions.stopping import StopOutcome

Kind = Literal["blocking", "async"]


class Work(Protocol):
    """What the dispatcher knows of a piece of work. Works are compared by identity."""

    @property
    def call(self) -> TaskCall:
        """What the child is sent."""
    @property
    def is_async(self) -> bool: ...


W = TypeVar("W", bound=Work)
W_contra = TypeVar("W_contra", bound=Work, contravariant=True)


class DispatchListener(Protocol[W_contra]):
    """Hears what becomes of each piece of work; called on the loop, inside the dispatcher."""

    def sent(self, work: W_contra, pid: int, execution_id: str) -> None:
        """The child gets the work now. The child knows it as `execution_id`: the task id, with
        `~` behind it if the child runs another delivery of the same message."""

    def refused(self, work: W_contra) -> None:
        """The child takes nothing new: the work is back at the front of the queue."""

    def started(self, work: W_contra, at: float) -> None:
        """Once, with the monotonic time: the child said so, or it is assumed. Not every work that
        finishes has started."""

    def said(self, work: W_contra, message: Message) -> bool | None:
        """Output, Gap, Progress, InputRequest or InputClosed. False: there is no room for more
        output until `read_on`."""

    def finished(self, work: W_contra, end: Terminal, exit_status: int | None) -> None:
        """Exactly once after each `sent` that is not followed by `refused`. `exit_status` is the
        child's, if `end` is its loss and it has ended. The child's next work is sent after this."""


class Dispatcher(Generic[W]):
    def __init__(self, pool: SessionPool, listener: DispatchListener[W]) -> None:
        """`pool` has the profiles `blocking` and `async`; their PoolSettings say how much a child
        takes at once and when it is replaced."""

    # --- the queue -----------------------------------------------------------------------------

    def enqueue(self, work: W) -> None:
        """Send the work to a child, now or in its turn."""

    def remove(self, work: W) -> bool:
        """Take the work out of the queue; False if it is not there."""

    def take_waiting(self) -> list[W]:
        """Empty the queues: what no child has."""

    # --- looking -------------------------------------------------------------------------------

    def is_sent(self, work: W) -> bool:
        """Whether a child has the work: after `sent`, before `finished` or `refused`."""

    def session_of(self, work: W) -> Session | None: ...

    def pid_of(self, work: W) -> int | None: ...

    def in_hand(self) -> list[W]:
        """What children have; on any thread."""

    def work_of(self, pid: int) -> W | None:
        """The only piece of work of a blocking child."""

    # --- what is done to work that a child has; nothing happens if none has it ------------------

    def signal(self, work: W, signum: int, why: str = "") -> None:
        """Send the child of a blocking work a signal; `SIGKILL` kills the whole family. The child
        gets nothing new."""

    def kill(self, work: W) -> None:
        """Kill the child and all its descendants, and whatever else the child runs."""

    def cancel(self, work: W, grace_s: float) -> None:
        """End the work in order, by force after the grace."""

    def soft_limit(self, work: W) -> bool:
        """Raise SoftTimeLimitExceeded in the work; False if no child has it."""

    def read_on(self, work: W) -> None:
        """There is room for its output again."""

    def end_input(self, work: W, request_id: str) -> None:
        """Have `input()` raise EOFError."""

    async def respond(self, work: W, request_id: str, text: str, *, eof: bool = False) -> None:
        """Answer an `input()`; UnknownInputRequest if nothing waits for that."""

    async def interrupt(self, work: W) -> StopOutcome:
        """Raise KeyboardInterrupt in the work."""

    async def stack(self, work: W) -> str | None:
        """Where its code is; None if no child has the work."""

    # --- children ------------------------------------------------------------------------------

    def resize(self, kind: Kind, size: int) -> None:
        """Have so many children from now on; busy ones that are too many finish first."""

    def size(self, kind: Kind) -> int: ...

    def free_count(self) -> int:
        """Blocking children that have no work and for which none waits; on any thread."""

    def replace_all(self, why: str) -> None:
        """Let every child go once it has finished what it has."""

    def kill_busy(self) -> None:
        """Kill every child that has work."""

    async def stop(self) -> None:
        """Send nothing more. Work that children have finishes when the pool ends them."""


_ = signal
