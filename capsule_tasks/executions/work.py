"""The protocols of the dispatcher: the work that it sends, and its listener."""

from __future__ import annotations

from typing import Literal, Protocol, TypeVar

from capsule_tasks.protocol.messages import Message, TaskCall, Terminal

Kind = Literal["blocking", "async"]


class Work(Protocol):
    """A piece of work. Two are the same only if they are one object."""

    @property
    def call(self) -> TaskCall:
        """The call that the child is sent."""

    @property
    def is_async(self) -> bool:
        """Whether it runs beside others in one child."""


W = TypeVar("W", bound=Work)
W_contra = TypeVar("W_contra", bound=Work, contravariant=True)


class DispatchListener(Protocol[W_contra]):
    """Hears what becomes of each piece of work; called on the loop, from within the dispatcher."""

    def sent(self, work: W_contra, pid: int, execution_id: str) -> None:
        """The child gets the work now, and knows it as `execution_id`.

        That is the task id, with `~` behind it if the child has the same message twice.
        """

    def refused(self, work: W_contra) -> None:
        """The child takes nothing new: the work is at the front of the queue again."""

    def started(self, work: W_contra, at: float) -> None:
        """The child said so, or it is assumed; at most once, `at` on the monotonic clock.

        If the child has ended before it said anything, this is told right before `finished`: the
        work may have begun.
        """

    def on_message(self, work: W_contra, message: Message) -> bool | None:
        """Output, Gap, Progress, InputRequest or InputClosed.

        False if there is no room for more output; `resume_output` says when there is.
        """

    def finished(self, work: W_contra, end: Terminal, exit_status: int | None) -> None:
        """Exactly once for each `sent`, unless it was refused.

        `exit_status` is that of the child, if the child has ended and the work did not by itself.
        The child is sent its next work when this returns.
        """
