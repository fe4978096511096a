"""Feeds events to the lifecycle of each execution, and has the adapters carry out its actions.

The dispatcher knows the children, the publisher knows Redis, the reporter knows Celery. None of
them decides, and none knows another. Output goes straight from the child to the publisher.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, ClassVar, Final

from capsule_tasks.errors import CapsuleError, TooManyLosses, UnknownInputRequest
from capsule_tasks.executions import actions as do
from capsule_tasks.executions.actions import Action, Timer
from capsule_tasks.executions.background import BackgroundTasks
from capsule_tasks.executions.calls import CodeCall
from capsule_tasks.executions.claims import Streaming
from capsule_tasks.executions.dispatcher import Dispatcher
from capsule_tasks.executions.ends import End, EndKind
from capsule_tasks.executions.execution import Execution, OutputListener
from capsule_tasks.executions.lifecycle import Event, Lifecycle, P
from capsule_tasks.executions.publishing.loss_counter import LossCounter
from capsule_tasks.executions.publishing.publisher import Publisher
from capsule_tasks.executions.publishing.stream_writer import StreamWriter
from capsule_tasks.executions.states import Run
from capsule_tasks.protocol.events import (
    Command,
    InterruptCommand,
    RespondCommand,
    StackCommand,
    Stacks,
)
from capsule_tasks.protocol.messages import (
    Gap,
    InputClosed,
    InputRequest,
    Message,
    Output,
    RunEvent,
    Streamed,
    Terminal,
)
from capsule_tasks.sessions import SessionPool
from capsule_tasks.system.usage import give_back_freed_memory

log = logging.getLogger("capsule_tasks.taskpool")

_TIDY_S = 0.1
"""The time that a task's `finally` blocks have at a hard limit, as under prefork."""
_LARGE_BYTES = 1024 * 1024
"""Messages from this size leave holes in the heap that are worth returning to the system."""
_RELEASE_MEMORY_AFTER_S = 1.0
"""By then the end is reported to Celery, and everything of the message is freed."""


class Supervisor:
    """All executions of a worker, from their admission until they are over; on the loop."""

    def __init__(
        self,
        sessions: SessionPool,
        *,
        async_limit: int,
        publisher: Publisher | None,
        losses: LossCounter,
        output_log: OutputListener,
    ) -> None:
        self.dispatcher = Dispatcher(sessions, self, async_limit=async_limit)
        self.totals: Counter[str] = Counter()
        self._publisher = publisher
        if publisher is not None:
            publisher.supervisor = self
        self._losses = losses
        self._output_log = output_log
        self._live: dict[Execution, None] = {}
        """Executions that are not over, in order of arrival."""
        self._unknown_tasks: set[str] = set()
        """Names of tasks that only the next children know."""
        self._waiting_for_tasks: dict[Execution, None] = {}
        """Executions of tasks that no child knows yet."""
        self._actions: deque[tuple[Execution, Action]] = deque()
        self._is_acting = False
        self._background = BackgroundTasks()
        self._is_memory_release_due = False

    async def start(self) -> None:
        if self._publisher is not None:
            await self._publisher.start()

    async def stop(self) -> None:
        """Leave what is not over to other workers; store what can be, for some seconds."""
        for execution in list(self._live):
            self.feed(execution, Lifecycle.on_worker_stopping)
        async with contextlib.AsyncExitStack() as stack:  # each is stopped, even if another fails
            stack.push_async_callback(self._losses.close)
            stack.push_async_callback(self._background.stop)
            stack.push_async_callback(self.dispatcher.stop)
            if self._publisher is not None:
                await self._publisher.stop()

    # --- executions ----------------------------------------------------------------------------

    def admit(self, execution: Execution) -> None:
        """Have the execution run, after those that came before."""
        self._live[execution] = None
        publisher = self._publisher
        streaming = publisher.open(execution) if publisher is not None else Streaming.NONE
        self.feed(execution, Lifecycle.on_admitted, streaming)

    def discard(self, execution: Execution, reason: str) -> None:
        """Publish the end of an execution that Celery discarded before it reached the pool."""
        if self._publisher is not None:
            self._background.spawn(self._discard(self._publisher, execution, reason))

    async def _discard(self, publisher: Publisher, execution: Execution, reason: str) -> None:
        if await publisher.is_discarded_here(execution):
            self._live[execution] = None
            self.feed(execution, Lifecycle.on_discarded, publisher.open(execution), reason)

    def feed(
        self, execution: Execution, event: Event[P], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """The only way in: the lifecycle handles the event; its actions are carried out.

        An action may cause the next event; the actions of that event come after all others.
        """
        life = execution.life
        pending = self._actions
        for action in life.handle(event, *args, **kwargs):
            pending.append((execution, action))
        if life.run is Run.OVER and execution in self._live:
            self._on_over(execution)
        if self._is_acting:
            return
        self._is_acting = True
        try:
            while pending:
                execution, action = pending.popleft()
                try:
                    for_stream = _FOR_STREAM.get(type(action))
                    if for_stream is None:
                        self._carry_out[type(action)](self, execution, action)
                    elif execution.stream is not None:
                        for_stream(execution.stream, action)
                except Exception:
                    log.exception("%r of %r failed", action, execution)
        finally:
            self._is_acting = False

    def stop_process(self, pid: int, signum: int) -> None:
        """End the only execution of a process, for callers that know nothing but its pid."""
        execution = self.dispatcher.execution_of(pid)
        if execution is not None:
            requested_by = f"a caller that terminates process {pid}"
            self.feed(execution, Lifecycle.on_stop_requested, signum, requested_by)

    def requeue_waiting(self) -> None:
        """Drop executions that no child has: their messages are redelivered."""
        for execution in list(self._live):
            self.feed(execution, Lifecycle.on_broker_lost)

    def kill_busy(self) -> None:
        """Kill the child of each execution that runs."""
        for execution in self.dispatcher.sent_executions():
            self.feed(execution, Lifecycle.on_kill_requested, "the worker's cold shutdown")

    def expect_tasks(self, names: set[str]) -> None:
        """Executions of these tasks wait for children that know them."""
        self._unknown_tasks |= names
        if self._publisher is not None:
            self._publisher.forget_tasks()

    def tasks_known(self, names: set[str]) -> None:
        """The next child knows these tasks, or never will: in both cases their executions go on."""
        self._unknown_tasks -= names
        waiting, self._waiting_for_tasks = self._waiting_for_tasks, {}
        for execution in waiting:
            self._send(execution)

    def running(self, task_id: str) -> Execution | None:
        """The execution of a task that a child has."""
        sent_executions = self.dispatcher.sent_executions()
        return next((sent for sent in sent_executions if sent.call.task_id == task_id), None)

    # --- messages of children ---------------------------------------------------------------------

    def on_message(self, execution: Execution, message: Message) -> bool | None:
        stream = execution.stream
        if isinstance(message, Output):
            execution.has_output = True
            self._output_log.write(execution, message)
            return stream.write(message) if stream is not None else None
        if isinstance(message, RunEvent):
            return stream.write(message) if stream is not None else None
        if isinstance(message, InputRequest):
            self.feed(execution, Lifecycle.on_input_requested, message)
        elif isinstance(message, InputClosed):
            self.feed(execution, Lifecycle.on_input_answered, message)
        elif isinstance(message, Streamed):
            if isinstance(message, Gap):
                execution.has_output = True
                self._output_log.write(execution, message)
            if stream is not None:
                stream.publish(message)
        return None

    def finished(self, execution: Execution, end: Terminal, exit_status: int | None) -> None:
        if execution.has_output:
            self._output_log.forget(execution)
        at = time.monotonic() if exit_status is not None else 0.0
        self.feed(execution, Lifecycle.on_finished, end, exit_status, at)

    # --- actions: the dispatcher ---------------------------------------------------------------

    def _send(self, execution: Execution, _action: object = None) -> None:
        if execution.life.run is not Run.QUEUED:
            return
        if execution.call.name in self._unknown_tasks:
            self._waiting_for_tasks[execution] = None
        else:
            self.dispatcher.enqueue(execution)

    def _unqueue(self, execution: Execution, _action: do.Unqueue) -> None:
        if execution in self._waiting_for_tasks:
            del self._waiting_for_tasks[execution]
        else:
            self.dispatcher.remove(execution)

    def _signal(self, execution: Execution, action: do.Signal) -> None:
        self._log_stop(execution, action.requested_by)
        if action.requested_by:
            why = f"a task was terminated with signal {action.signum}"
        else:
            why = "a task met its hard limit"
        self.dispatcher.signal(execution, action.signum, why)

    def _cancel_in_child(self, execution: Execution, action: do.CancelInChild) -> None:
        self._log_stop(execution, action.requested_by)
        grace_s = action.grace_s
        if grace_s is None:
            assert self._publisher is not None, "without streams no command comes without a grace"
            grace_s = self._publisher.settings.cancel_grace_s
        self.dispatcher.cancel(execution, grace_s)

    def _log_stop(self, execution: Execution, requested_by: str) -> None:
        if requested_by:
            name, task_id, pid = execution.call.name, execution.call.task_id, execution.pid
            log.info(
                "Cancelling %s[%s] in process %d: asked by %s", name, task_id, pid, requested_by
            )

    def _raise_soft_limit(self, execution: Execution, _action: do.RaiseSoftLimit) -> None:
        if self.dispatcher.soft_limit(execution):
            execution.reporter.soft_limit()

    def _command_child(self, execution: Execution, action: do.CommandChild) -> None:
        self._background.spawn(self._command(execution, action.command, action.request_id))

    async def _command(self, execution: Execution, command: Command, request_id: str) -> None:
        try:
            if isinstance(command, InterruptCommand):
                await self.dispatcher.interrupt(execution)
            elif isinstance(command, RespondCommand):
                request_id = command.request_id or request_id
                await self.dispatcher.respond(execution, request_id, command.text, eof=command.eof)
            elif isinstance(command, StackCommand):
                text = await self.dispatcher.stack(execution)
                if text is not None and execution.stream is not None:
                    text = text if command.all_frames else execution.reporter.task_frames(text)
                    execution.stream.publish(Stacks(in_reply_to=command.request_id, text=text))
        except UnknownInputRequest as error:
            log.info("response to a question that is closed: %s", error)
        except CapsuleError as error:
            log.warning("a command to task %s failed: %s", execution.call.task_id, error)

    def _judge_loss(self, execution: Execution, action: do.JudgeLoss) -> None:
        if action.end is None and not self._losses.counts_in_redis:
            self.feed(execution, Lifecycle.on_loss_judged, None)
        else:
            self._background.spawn(self._judge(execution, action.end))

    async def _judge(self, execution: Execution, end: End | None) -> None:
        """Count the loss, or the delivery of a message that may have cost processes before."""
        call = execution.call
        count = await (self._losses.admit(call) if end is None else self._losses.judge(call))
        judged = None
        if count:
            last = end.message if end is not None else None
            error = TooManyLosses.of(call.name, call.task_id, count, last)
            judged = End(EndKind.TOO_MANY_LOSSES, str(error), losses=count)
        if execution.life.is_over:
            await self._losses.forget(call)
        else:
            self.feed(execution, Lifecycle.on_loss_judged, judged)

    # --- actions: the reporter -----------------------------------------------------------------

    def _report_end(self, execution: Execution, action: do.ReportEnd) -> None:
        if self._losses.counted_locally and action.end.kind is EndKind.TRACED:
            self._losses.forget_here(execution.call)
        execution.reporter.ended(action.end, frees_slot=action.frees_slot)

    # --- actions: timers -----------------------------------------------------------------------

    def _start_timer(self, execution: Execution, action: do.StartTimer) -> None:
        timer, timers = action.timer, execution.timers
        if timer not in timers and not execution.life.is_over:
            loop, seconds = asyncio.get_running_loop(), self._seconds(execution, timer)
            timers[timer] = loop.call_later(seconds, self._on_time, execution, timer)

    def _seconds(self, execution: Execution, timer: Timer) -> float:
        origin = execution.life.origin
        match timer:
            case Timer.SOFT_LIMIT:
                return origin.soft_limit_s or 0.0
            case Timer.HARD_LIMIT:
                return origin.hard_limit_s or 0.0
            case Timer.TIDY:
                return _TIDY_S
        assert self._publisher is not None, "without streams nothing waits for Redis"
        return self._publisher.settings.claim_wait_s

    def _on_time(self, execution: Execution, timer: Timer) -> None:
        del execution.timers[timer]
        if timer is Timer.HARD_LIMIT and execution.life.run is Run.RUNNING:
            self.totals["hard_limits"] += 1
        self.feed(execution, Lifecycle.on_timer, timer)

    # --- the end -------------------------------------------------------------------------------

    def _on_over(self, execution: Execution) -> None:
        del self._live[execution]
        for handle in execution.timers.values():
            handle.cancel()
        execution.timers.clear()
        call = execution.call
        if len(call.source if isinstance(call, CodeCall) else call.body) >= _LARGE_BYTES:
            self._release_memory_soon()
        if self._losses.counted_on_delivery and self._losses.is_counted_on_delivery(call):
            self._background.spawn(self._losses.forget(call))

    def _release_memory_soon(self) -> None:
        """Once for all large messages of a second; on a thread, since this takes long."""
        if not self._is_memory_release_due:
            self._is_memory_release_due = True
            asyncio.get_running_loop().call_later(_RELEASE_MEMORY_AFTER_S, self._release_memory)

    def _release_memory(self) -> None:
        self._is_memory_release_due = False
        asyncio.get_running_loop().run_in_executor(None, give_back_freed_memory)

    _carry_out: ClassVar[dict[type[Action], Callable[[Supervisor, Execution, Any], None]]] = {
        do.Send: _send,
        do.Unqueue: _unqueue,
        do.Signal: _signal,
        do.CancelInChild: _cancel_in_child,
        do.RaiseSoftLimit: _raise_soft_limit,
        do.CommandChild: _command_child,
        do.EndInput: lambda self, execution, action: self._background.spawn(
            self.dispatcher.end_input(execution, action.request_id)
        ),
        do.JudgeLoss: _judge_loss,
        do.ReportAccepted: lambda _, execution, action: execution.reporter.accepted(
            execution.pid, action.at, defers_ack=action.defers_ack
        ),
        do.Acknowledge: lambda _, execution, __: execution.reporter.acknowledge(),
        do.FreeSlot: lambda _, execution, __: execution.reporter.free_slot(),
        do.ReportEnd: _report_end,
        do.StartTimer: _start_timer,
    }


_FOR_STREAM: Final[dict[type[Action], Callable[[StreamWriter, Any], None]]] = {
    do.ClaimFirst: lambda stream, _: stream.publisher.claimer.claim_first(stream),
    do.ClaimWithEvents: lambda stream, action: stream.claim_with_events(action.takes_over),
    do.Reclaim: lambda stream, action: stream.reclaim(action.owner_before),
    do.AwaitPrevious: lambda stream, _: stream.publisher.claimer.await_previous_end(stream),
    do.ConfirmLease: lambda stream, action: stream.publisher.claimer.confirm_lease(
        stream.execution, action.owner
    ),
    do.AwaitInFlight: lambda stream, _: stream.await_in_flight(),
    do.Publish: lambda stream, action: stream.publish(action.event),
    do.PublishStart: lambda stream, _: stream.publish_start(),
    do.Flush: lambda stream, _: stream.flush(),
    do.PublishEnd: lambda stream, action: stream.publish_end(action.event),
    do.CloseStream: lambda stream, _: stream.close(),
    do.ReadCommands: lambda stream, _: stream.read_commands(),
    do.RecordRunning: lambda stream, _: stream.publisher.index.record_state(stream, "running"),
    do.RecordEnd: lambda stream, action: stream.record_end(action.event),
}
"""Actions that are carried out by the stream of the execution, if there is one."""
