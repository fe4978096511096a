"""`TaskPool` implements Celery's pool interface. Everything here runs on the hub thread."""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

from billiard.pool import LaxBoundedSemaphore
from celery import signals
from celery.concurrency import prefork
from celery.concurrency.base import BasePool
from celery.exceptions import TaskRevokedError
from celery.worker import state
from celery.worker.request import Request
from kombu.asynchronous import get_event_loop

from capsule_tasks.client.code import CODE_TASK
from capsule_tasks.client.configuration import setting
from capsule_tasks.client.sessions.as_task import SESSION_TASK
from capsule_tasks.executions.execution import Execution
from capsule_tasks.executions.lifecycle import Lifecycle
from capsule_tasks.storage.connections.doorbells import OnRing
from capsule_tasks.taskpool.code.session_calls import SessionCallReporter
from capsule_tasks.taskpool.consumer_step import ConsumerStep
from capsule_tasks.taskpool.hub import Bridge, RuntimeThread
from capsule_tasks.taskpool.inspection import describe, health, stack, totals
from capsule_tasks.taskpool.options import check
from capsule_tasks.taskpool.pool_runtime import PoolRuntime
from capsule_tasks.taskpool.remote_commands import MailboxNode
from capsule_tasks.taskpool.reporting.reporter import ExecutionPid, TaskReporter, is_coroutine_task
from capsule_tasks.taskpool.shutdown_watchdog import ShutdownWatchdog, servers_reachable

log = logging.getLogger("capsule_tasks.taskpool")

_STOP_S = 30.0
_TERM = signal.SIGTERM
_MAX_WAIT_S = 1.0
"""Between two checks of the hub's timers, while the pool waits for its last tasks."""


class TaskPool(prefork.TaskPool):
    """Runs tasks in sessions. Set it with `worker_pool = "capsule_tasks.taskpool:TaskPool"`.

    Celery sizes a pool by the container's CPU quota (`--concurrency=auto`) only if the pool's class
    derives from prefork's. Every method of prefork's pool that uses its processes is overridden.
    """

    uses_semaphore = True
    body_can_be_buffer = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.app: Any = self.app or self.options["initargs"][0]
        self._size = int(self.limit)  # 0 for `--autoscale=3`
        self._tasks: set[TaskReporter] = set()
        self._task_reported = threading.Condition()
        self._coroutines: set[TaskReporter] = set()
        """Coroutines, from when they are applied until they are over."""
        self._bridge = Bridge()
        self._thread = RuntimeThread()
        self._runtime: PoolRuntime | None = None
        self._consumer: Any = None
        self._hub: Any = None
        self._calls_end_at = 0.0
        """So long calls of named sessions may go on in a shutdown."""
        self._last_info: dict[str, Any] = {}
        # Celery takes the slots where it has a hub, and the pool (`waitforslot`) where it has none.
        self._slots: Any = self.options.get("semaphore") or LaxBoundedSemaphore(self._size)
        check(self.app)
        limits = (
            setting(self.app, name) for name in ("capsule_child_stop_s", "capsule_worker_stop_s")
        )
        self._watchdog = ShutdownWatchdog(
            sum(limits), self._is_busy, partial(servers_reachable, self.app)
        )
        # The signal, since Celery's main thread may hang before it closes the pool.
        signals.worker_shutting_down.connect(self._watchdog.on_stopping)
        signals.worker_shutdown.connect(self._watchdog.on_worker_stopped)
        self.app.steps["consumer"].add(ConsumerStep)
        self.app.control.mailbox.node_cls = MailboxNode

    # --- life ----------------------------------------------------------------------------------

    def on_start(self) -> None:
        signals.worker_before_create_process.send(sender=self)
        self._runtime = PoolRuntime(self.app, self.options, self._thread)
        self._watchdog.start()
        self._thread.start()
        self._thread.start_coroutine(self._runtime.start(self._size)).result()
        if self.options.get("threads", True):
            self._bridge.start()

    def did_start_ok(self) -> bool:
        """False if children cannot be started: the worker logs that and exits."""
        return self._runtime is None or not self._runtime.sessions.info("blocking").breaker_open

    def register_with_event_loop(self, hub: Any) -> None:
        if not self._thread.is_started:  # a cold shutdown while the worker was still starting
            return
        hub.add_reader(self._bridge, self._bridge.drain)
        # The hub was woken by messages of children: no other thread need be woken for their ends.
        hub.add_reader(self._thread, self._bridge.run_after, self._thread.run_once)
        # A single task is sent at once. Of many tasks, those that one iteration of the hub applied
        # are sent just before it sleeps, so that children do not compete with it for the CPU.
        hub.on_tick.add(self._thread.run_posts)
        self._hub = hub
        self._thread.attach_hub()

    def attach_consumer(self, consumer: Any) -> None:
        """Celery's consumer is new, after a reconnect too: count on its counter from now on."""
        self._consumer = consumer
        self._watchdog.watch(consumer.controller.blueprint.shutdown_complete)
        for task in self._tasks:  # the new counter does not count their messages
            task.release_prefetch()

    def listen(self, channel: str, ring: OnRing) -> None:
        """Have `ring` called on the runtime's loop; see `Publisher.listen`."""
        runtime = self._runtime
        if runtime is not None and runtime.publisher is not None:
            self._thread.post(runtime.publisher.listen, channel, ring)

    def on_close(self) -> None:
        """No new tasks will come; those that are here go on, and may call named sessions."""
        self._watchdog.on_stopping()

    def _is_busy(self) -> bool:
        """Whether the worker waits for tasks or calls; those that have ended do not count."""
        if state.should_terminate:
            return False
        tasks = list(self._tasks)
        return time.monotonic() < self._calls_end_at or not all(task.ready() for task in tasks)

    def on_stop(self) -> None:
        """Wait for every task and report its end to Celery, then end the children.

        Named sessions are hosted until then: the tasks may wait for calls that nobody else runs.
        """
        self.on_close()
        self._thread.detach_hub()
        hub = get_event_loop()
        kill_at = math.inf
        if self._runtime is not None:  # they may wait for other workers, and this one need not
            self._thread.post(self._runtime.session_calls.requeue_all)
        while self._tasks and self._runtime is not None:
            self._await_calls(hub)
            kill_at = self._stop_faster(kill_at)
            self._thread.run_posts()
            if hub is not None:  # late acknowledgements are among these
                prefork._run_ready_callbacks(hub)  # noqa: SLF001
        self._end()

    def _await_calls(self, hub: Any) -> None:
        if self._bridge.is_started:
            with self._task_reported:
                self._task_reported.wait_for(lambda: not self._tasks, _MAX_WAIT_S)
        else:
            timeout_s = hub.fire_timers() if hub is not None else _MAX_WAIT_S
            self._bridge.wait(min(timeout_s, _MAX_WAIT_S))
            self._bridge.drain()

    def _stop_faster(self, kill_at: float) -> float:
        """In a cold shutdown start nothing, and give what runs some time; return when that ends."""
        runtime = self._runtime
        if runtime is None or not state.should_terminate:
            return math.inf
        if self._consumer is not None:  # Celery has cancelled what it knew to run then
            self._consumer.cancel_active_requests()
        if runtime.host is not None:
            self._thread.post(runtime.host.stop_taking)
        self._thread.post(runtime.requeue_waiting)
        now = time.monotonic()
        if now >= kill_at:
            self._thread.post(runtime.supervisor.kill_busy)
        return float(min(kill_at, now + setting(self.app, "capsule_child_stop_s")))

    def on_terminate(self) -> None:
        """Kill what runs. Its messages are not acknowledged, and so are delivered again."""
        self._end()

    def _end(self) -> None:
        """Safe at any time, any number of times."""
        if self._runtime is None:
            return
        self._thread.detach_hub()
        hub = get_event_loop()
        if hub is not None:
            hub.remove_reader(self._bridge)
            hub.remove_reader(self._thread)
            hub.on_tick.discard(self._thread.run_posts)
        self._last_info = self._get_info()
        runtime, self._runtime = self._runtime, None
        grace_s = 0.0 if state.should_terminate else setting(self.app, "capsule_call_stop_s")
        self._calls_end_at = time.monotonic() + grace_s
        ending = self._thread.start_coroutine(runtime.stop(grace_s))
        late_at = self._calls_end_at + _STOP_S
        while not wait([ending], _MAX_WAIT_S).done and time.monotonic() < late_at:
            if state.should_terminate and runtime.host is not None:
                self._calls_end_at = 0.0
                self._thread.post(runtime.host.end_grace)
        try:
            ending.result(0)
        except TimeoutError:
            log.exception("the sessions did not stop within %s s", grace_s + _STOP_S)
        self._thread.stop()
        runtime.output_log.stop()  # not on the loop: it writes the output that waits
        self._tasks.clear()
        self._bridge.stop()

    def restart(self) -> None:
        """Replace the children by ones that import the app again; nothing that runs is lost."""
        if self._runtime is not None:
            self._runtime.restart()

    def flush(self) -> None:
        """The connection to the broker is lost: tasks that no child has are redelivered."""
        if self._runtime is not None:
            self._thread.post(self._runtime.requeue_waiting)

    # --- work ----------------------------------------------------------------------------------

    def on_apply(
        self,
        target: Any,
        args: Any = (),
        _kwargs: Any = None,
        *,
        accept_callback: Any = None,
        waitforslot: bool = False,
        **_: Any,
    ) -> TaskReporter | None:
        if self._runtime is None:
            return None
        request = getattr(accept_callback, "__self__", None)
        if not isinstance(request, Request):
            raise TypeError(f"this pool runs Celery tasks only, not {target!r}")
        if request.task.name == SESSION_TASK:
            return self._apply_session_call(self._runtime, request, args)
        task = TaskReporter(self, self._bridge, request, args)
        execution, is_async = task.execution, task.execution.life.origin.is_async
        if execution.call.name == CODE_TASK:
            self._runtime.code.place(execution)
        else:
            execution.lane = self._runtime.dispatcher.lanes["async" if is_async else "blocking"]
        if is_async:
            self._start_async_children()
            self._run_without_slot(task)
        elif waitforslot:
            self._slots.acquire()
        self._tasks.add(task)
        self._thread.post_with_batch(self._runtime.supervisor.admit, task.execution)
        if self._hub is None or len(self._tasks) == 1:
            self._thread.run_posts()
        return task

    def _apply_session_call(
        self, runtime: PoolRuntime, request: Request, args: Any
    ) -> SessionCallReporter:
        """Wait for a call of a named session in the main process, without a slot."""
        task = SessionCallReporter(self, self._bridge, request, args)
        self._run_without_slot(task)
        self._tasks.add(task)
        self._thread.post(runtime.session_calls.start, task)
        return task

    def without_slots(self, take_slot: Callable[[Any], object]) -> Callable[[Any], None]:
        """Have requests of coroutines come without a slot, and all others by `take_slot`.

        Otherwise they would wait behind every blocking task that waits for a slot.
        """

        def on_task_request(request: Any) -> None:
            if not is_coroutine_task(request.task) and request.task.name != SESSION_TASK:
                take_slot(request)
                return
            with contextlib.suppress(TaskRevokedError):  # reported by the request itself
                request.execute_using_pool(self)

        return on_task_request

    def _start_async_children(self) -> None:
        """Coroutines have children of their own, from the first coroutine on."""
        runtime = self._runtime
        if runtime is not None and not runtime.dispatcher.lanes["async"].size:
            children = setting(self.app, "capsule_async_children")
            self._thread.post(runtime.dispatcher.resize, "async", children)

    def _run_without_slot(self, task: TaskReporter) -> None:
        """A coroutine takes no slot; and one more message may be fetched while it runs."""
        task.has_slot = False
        self._coroutines.add(task)
        if self._consumer is not None and len(self._coroutines) <= self._max_coroutines():
            task.qos = self._consumer.qos
            task.qos.add_one()

    def _max_coroutines(self) -> int:
        return int(
            setting(self.app, "capsule_async_limit") * setting(self.app, "capsule_async_children")
        )

    @property
    def coroutines(self) -> int:
        """The number of tasks in the pool that need no slot."""
        return min(len(self._coroutines), self._max_coroutines())

    def on_reported(self, task: TaskReporter) -> None:
        with self._task_reported:
            self._tasks.discard(task)
            self._task_reported.notify_all()
        task.release_prefetch()

    def on_over(self, task: TaskReporter) -> None:
        self._coroutines.discard(task)
        if task.has_slot:
            self._slots.release()

    # --- stopping one task ---------------------------------------------------------------------

    def terminate_job(self, pid: int, signal: int | None = None) -> None:
        signum = int(signal or _TERM)
        if isinstance(pid, ExecutionPid):
            if (task := pid.reporter()) is not None:
                task.terminate(signum)
        elif self._runtime is not None:
            self._thread.post(self._runtime.supervisor.stop_process, pid, signum)

    def request_stop(self, execution: Execution, *request: object) -> None:
        """Feed the execution `on_stop_requested` with these arguments, on the loop; any thread."""
        if self._runtime is not None:
            feed = self._runtime.supervisor.feed
            self._thread.post(feed, execution, Lifecycle.on_stop_requested, *request)

    def cancel_run(self, run_id: str) -> None:
        """Cancel the durable run whose task has ended without it; on the loop."""
        if self._runtime is not None:
            self._runtime.cancel_run(run_id, "the end of its task")

    def stop_session_call(self, task: SessionCallReporter, *, is_worker_stopping: bool) -> None:
        """Cancel the call that a task waits for, or leave it to another worker; any thread."""
        if self._runtime is not None:
            calls = self._runtime.session_calls
            self._thread.post(calls.requeue if is_worker_stopping else calls.cancel, task)

    # --- size ----------------------------------------------------------------------------------

    def grow(self, n: int = 1) -> None:
        self._resize(self._size + n)
        for _ in range(n):
            self._slots.grow()

    def shrink(self, n: int = 1) -> None:
        """ValueError if fewer than `n` children are idle."""
        if n > self._size:
            raise ValueError(f"can't shrink pool by {n}: it has {self._size} children")
        if self._runtime is not None and self._runtime.dispatcher.free_slots() < n:
            raise ValueError("Can't shrink pool. All processes busy!")
        self._resize(self._size - n)
        for _ in range(n):
            self._slots.shrink()

    def maintain_pool(self, *_: Any, **__: Any) -> None:
        """Do nothing: the pool replaces a child as soon as it ends."""

    @property
    def num_processes(self) -> int:
        return self._size

    def _resize(self, size: int) -> None:
        self._size = self.limit = size
        if self._runtime is not None:
            self._thread.post(self._runtime.dispatcher.resize, "blocking", size)

    # --- inspection -------------------------------------------------------------------------------

    def _get_info(self) -> dict[str, Any]:
        runtime = self._runtime
        if runtime is None and self._last_info:
            return self._last_info
        named = BasePool._get_info(self)  # noqa: SLF001 - prefork's asks the processes of its own
        options = self.options
        named |= {  # as prefork names them
            "max-concurrency": self._size,
            "max-tasks-per-child": options.get("maxtasksperchild") or "N/A",
            "max-memory-per-child-kb": options.get("max_memory_per_child") or "N/A",
            "timeouts": [options.get("soft_timeout") or 0, options.get("timeout") or 0],
            "writes": "N/A",
        }
        if runtime is None:
            return dict(named)
        return {
            **named,
            "put-guarded-by-semaphore": self.putlocks,
            "processes": [child.pid for child in runtime.dispatcher.children()],
            "sessions": [describe(child) for child in runtime.dispatcher.children()],
            "capsule": totals(runtime.supervisor, len(self._tasks), runtime.last_error),
        }

    def health(self) -> dict[str, Any]:
        """The answer to `inspect capsule_health`."""
        runtime = self._runtime
        if runtime is None:
            return {"healthy": False, "reasons": ["the pool is not running"]}
        return health(runtime.supervisor, len(self._tasks), runtime.last_error)

    def stack_of(self, task_id: str, *, all_frames: bool = False) -> Any:
        """The answer to `inspect capsule_stack`, or its future, done on the hub thread."""
        if self._runtime is None:
            return {"error": "the pool is not running"}
        answer = Future[dict[str, str]]()

        def give(asked: Future[dict[str, str]]) -> None:
            if asked.cancelled():
                return
            fault = asked.exception()
            error = {"error": f"task {task_id!r}: {fault!r}"}
            self._bridge.put(answer.set_result, asked.result() if fault is None else error)

        asking = stack(self._runtime.supervisor, task_id, all_frames=all_frames)
        self._thread.start_coroutine(asking).add_done_callback(give)
        return answer
