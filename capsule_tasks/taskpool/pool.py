"""`TaskPool`: what Celery sees of the pool. Everything here runs on the hub thread."""

from __future__ import annotations

import logging
import os
import signal
import threading
from functools import partial
from typing import Any

from celery import signals
from celery.concurrency.base import BasePool
from celery.concurrency.prefork import _run_ready_callbacks
from celery.worker import state
from kombu.asynchronous import get_event_loop

from capsule_tasks.child import app_lane
from capsule_tasks.errors import TaskNotCarried
from capsule_tasks.protocol.messages import Gap, Output
from capsule_tasks.protocol.values import NotCarried
from capsule_tasks.sessions import SessionPool
from capsule_tasks.sessions.session import Session
from capsule_tasks.sessions.template import Template
from capsule_tasks.sessions.warm import WarmSpawner
from capsule_tasks.system.portable import IS_LINUX
from capsule_tasks.taskpool import commands  # noqa: F401 - what it defines, a worker answers
from capsule_tasks.taskpool.bridge import Bridge
from capsule_tasks.taskpool.calls import is_coroutine_task, task_call
from capsule_tasks.taskpool.crew import Crew
from capsule_tasks.taskpool.echo import Echo
from capsule_tasks.taskpool.jobs import ExecutionPid, Job
from capsule_tasks.taskpool.options import crew_limits, profile, setting
from capsule_tasks.taskpool.origin import lane_settings
from capsule_tasks.taskpool.replies import Later, PatientNode
from capsule_tasks.taskpool.runtime import RuntimeThread
from capsule_tasks.taskpool.slots import Slots
from capsule_tasks.taskpool.steps import ConsumerStep
from capsule_tasks.taskpool.view import describe, health, members, settings, stack, totals

log = logging.getLogger("capsule_tasks.taskpool")

_STOP_S = 30.0
_LONGEST_WAIT_S = 1.0
"""Between two looks at the hub's timers, while the pool waits for its last jobs."""


class TaskPool(BasePool):
    """Runs tasks in sessions. Set it with `worker_pool = "capsule_tasks.taskpool:TaskPool"`."""

    uses_semaphore = True
    body_can_be_buffer = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.app: Any = self.app or self.options["initargs"][0]
        self._size = int(self.limit or 1)
        self._jobs: set[Job] = set()
        self._job_over = threading.Condition()
        self._coroutines: dict[str, bool] = {}
        self._bridge = Bridge()
        self._runtime = RuntimeThread()
        self._crew: Crew | None = None
        self._sessions: SessionPool | None = None
        self._spawner: WarmSpawner | None = None
        self._consumer: Any = None
        self._hub: Any = None
        self._last_info: dict[str, Any] = {}
        self._semaphore = self.options.get("semaphore")
        self._slots = Slots(self._size) if self.putlocks else None
        self.app.steps["consumer"].add(ConsumerStep)
        self.app.control.mailbox.node_cls = PatientNode

    # --- life ----------------------------------------------------------------------------------

    def on_start(self) -> None:
        """Take the template while this process is as it should be in every child; then begin."""
        signals.worker_before_create_process.send(sender=self)
        template = self._take_template()
        hostname = self.options["initargs"][1]
        self._profiles = {
            kind: profile(
                self.app,
                lane_settings(
                    self.app,
                    hostname,
                    kind=kind,
                    async_limit=setting(self.app, "capsule_async_limit"),
                    log_file=os.environ.get("CELERY_LOG_FILE") or None,
                    log_level=int(os.environ.get("CELERY_LOG_LEVEL") or 0),
                ),
                size=self._size,
            )
            for kind in ("blocking", "async")
        }
        self._echo = Echo(self.app)
        self._runtime.start()
        self._runtime.begin(self._open(template)).result()
        if self.options.get("threads", True):
            self._bridge.serve_alone()

    def _take_template(self) -> Template | None:
        if setting(self.app, "capsule_start") != "fork" or not IS_LINUX:
            return None
        others = [t.name for t in threading.enumerate() if t is not threading.current_thread()]
        if others:
            log.info("the worker is copied while other threads run: %s", ", ".join(others))
        app_lane.bequeath(self.app)
        # Prefork does the same; and these are imports of the app's own, which it knows.
        return Template.fork_of_caller(despite_threads=True)

    async def _open(self, template: Template | None) -> None:
        blocking = self._profiles["blocking"]
        self._spawner = WarmSpawner(blocking, template)
        await self._spawner.start()
        self._sessions = SessionPool(
            self._profiles, spawner=self._spawner, on_new=self._listen_from_the_start
        )
        await self._sessions.start()
        self._crew = Crew(
            self._sessions,
            crew_limits(self.app, self.options),
            self._bridge,
            self._on_output,
            self._on_over,
            self._echo.forget,
        )
        self._crew.resize("blocking", self._size)

    def did_start_ok(self) -> bool:
        """False if children cannot be started, so that the worker says so and ends."""
        sessions = self._sessions
        return sessions is None or not sessions.info("blocking").breaker_open

    def register_with_event_loop(self, hub: Any) -> None:
        self._bridge.register(hub)
        hub.add_reader(self._runtime, self._on_news)
        # A task that is alone goes at once. With others about, those that one turn of the hub
        # applied go just before it sleeps: the children do not compete with it for the machine.
        hub.on_tick.add(self._runtime.make_posts)
        self._hub = hub
        self._runtime.welcome_hub()

    def _on_news(self) -> None:
        """The hub was woken by what children say: no other thread need be."""
        bridge = self._bridge
        bridge.is_quiet = True
        try:
            self._runtime.turn()
        except BaseException:  # an exit of the worker, from a signal's handler
            bridge.is_quiet = False
            bridge.flush()
            raise
        bridge.is_quiet = False
        bridge.make_calls()

    def introduce(self, consumer: Any) -> None:
        """Celery's consumer is new, after a reconnect too: count on its counter from now on."""
        self._consumer = consumer
        for job in self._jobs:
            if job.qos is not None:
                job.qos = consumer.qos
                consumer.qos.increment_eventually()

    def on_close(self) -> None:
        """Nothing new will come; what there is goes on."""

    def on_stop(self) -> None:
        """Wait for every job and tell Celery of each, then end the children."""
        self._runtime.dismiss_hub()
        hub = get_event_loop()
        if self._bridge.is_served:
            with self._job_over:
                self._job_over.wait_for(lambda: not self._jobs)
        while self._jobs and self._crew is not None:
            self._bridge.wait(min(hub.fire_timers(), _LONGEST_WAIT_S) if hub is not None else None)
            self._bridge.drain()
            self._cancel_what_began_late()
            self._runtime.make_posts()
            if hub is not None:  # late acknowledgements are among these
                _run_ready_callbacks(hub)
        self._end()

    def _cancel_what_began_late(self) -> None:
        """A cold shutdown has cancelled what Celery knew to run; others are heard of after it."""
        if state.should_terminate and self._consumer is not None:
            self._consumer.cancel_active_requests()

    def on_terminate(self) -> None:
        """Kill what runs. Its messages are not acknowledged, and so are delivered again."""
        self._end()

    def _end(self) -> None:
        """Safe at any time, any number of times."""
        if self._crew is None:
            return
        self._runtime.dismiss_hub()
        self._last_info = self._get_info()
        crew, self._crew = self._crew, None
        ending = self._runtime.begin(self._close(crew))
        try:
            ending.result(_STOP_S)
        except TimeoutError:
            log.exception("the sessions did not end within %s s", _STOP_S)
        self._runtime.stop(_STOP_S)
        self._jobs.clear()
        hub = get_event_loop()
        if hub is not None:
            self._bridge.unregister(hub)
            hub.remove_reader(self._runtime)
            hub.on_tick.discard(self._runtime.make_posts)
        self._bridge.close()

    async def _close(self, crew: Crew) -> None:
        await crew.stop()
        if self._sessions is not None:
            await self._sessions.stop()
        if self._spawner is not None:
            await self._spawner.stop()

    def restart(self) -> None:
        """New children, of an app that is imported anew; nothing that runs is lost."""
        if self._crew is not None:
            self._runtime.begin(self._renew(self._crew))

    async def _renew(self, crew: Crew) -> None:
        if self._spawner is not None:
            await self._spawner.renew()
        crew.replace_all("the pool was restarted")

    def flush(self) -> None:
        """The connection to the broker is lost: what no child has begun comes again."""
        if self._crew is not None:
            self._runtime.post(self._crew.drop_waiting)

    # --- work ----------------------------------------------------------------------------------

    def on_apply(
        self,
        target: Any,
        args: Any = (),
        _kwargs: Any = None,
        *,
        accept_callback: Any = None,
        callback: Any = None,
        error_callback: Any = None,
        timeout_callback: Any = None,
        soft_timeout: float | None = None,
        timeout: float | None = None,
        waitforslot: bool = False,
        **_: Any,
    ) -> Job | None:
        if self._crew is None:
            return None
        if len(args) != 6:
            raise TypeError(f"this pool runs Celery tasks only, not {target!r}")
        request = getattr(accept_callback, "__self__", None)
        soft_s, hard_s = self._limits(request, soft_timeout, timeout)
        try:
            call = task_call(args, request)
        except NotCarried as fault:
            self._refuse(error_callback, args, fault)
            return None
        job = Job(
            call=call,
            is_async=self._is_async(call.name),
            accept_callback=accept_callback,
            callback=callback,
            error_callback=error_callback,
            timeout_callback=timeout_callback,
            soft_limit_s=soft_s,
            hard_limit_s=hard_s,
            terminate=self._terminate,
        )
        self._jobs.add(job)
        if job.is_async:
            self._make_room(job)
        elif waitforslot and self._slots is not None:
            self._slots.acquire()
        self._runtime.post_lazily(self._crew.submit, job)
        if self._hub is None or len(self._jobs) == 1:
            self._runtime.make_posts()
        return job

    def _refuse(self, error_callback: Any, args: Any, fault: Exception) -> None:
        """It cannot be sent: its failure is told once the caller has the answer."""
        error = TaskNotCarried(str(args[0]), str(args[1]), str(fault))

        def refuse() -> None:
            if not self.takes_without_slot(args[0]):
                self._release_semaphore()
            job.say_failed(error)

        job = Job(
            call=_Refused(args[0], args[1]),
            is_async=False,
            accept_callback=None,
            callback=None,
            error_callback=error_callback,
            timeout_callback=None,
            soft_limit_s=None,
            hard_limit_s=None,
            terminate=lambda *_: None,
        )
        self._bridge.put(refuse)

    def _limits(
        self, request: Any, soft_s: float | None, hard_s: float | None
    ) -> tuple[float | None, float | None]:
        """As they are now: Celery remembers a task's limits from when its consumer started."""
        task = getattr(request, "task", None)
        if task is not None:
            hard_of_call, soft_of_call = request.time_limits or (None, None)
            soft_s = soft_of_call or task.soft_time_limit
            hard_s = hard_of_call or task.time_limit
        soft_s = soft_s or self.options.get("soft_timeout")
        hard_s = hard_s or self.options.get("timeout")
        return soft_s, hard_s

    def takes_without_slot(self, name: str) -> bool:
        """Whether a task is beside the slots; asked before one is taken."""
        return self._semaphore is not None and self._is_async(name)

    def _is_async(self, name: str) -> bool:
        known = self._coroutines.get(name)
        if known is None:
            task = self.app.tasks.get(name)
            known = self._coroutines[name] = task is not None and is_coroutine_task(task)
        return known

    def _make_room(self, job: Job) -> None:
        """A coroutine takes no slot; and one more message may be fetched while it runs."""
        job.holds_slot = False
        crew = self._crew
        if crew is not None and not crew.size["async"]:
            self._runtime.post(crew.resize, "async", setting(self.app, "capsule_async_children"))
        running = sum(other.qos is not None for other in self._jobs)
        most = setting(self.app, "capsule_async_limit") * setting(
            self.app, "capsule_async_children"
        )
        if self._consumer is not None and running < most:
            job.qos = self._consumer.qos
            job.qos.increment_eventually()

    def _on_over(self, job: Job) -> None:
        with self._job_over:
            self._jobs.discard(job)
            self._job_over.notify_all()
        if job.qos is not None:
            if self._consumer is not None and job.qos is self._consumer.qos:
                job.qos.decrement_eventually()
            job.qos = None
        if job.holds_slot:
            self._release_slot()

    def _release_slot(self) -> None:
        self._release_semaphore()
        if self._slots is not None:
            self._slots.release()

    def _release_semaphore(self) -> None:
        if self._semaphore is not None:
            self._semaphore.release()

    def _listen_from_the_start(self, session: Session) -> None:
        """What a child says while it becomes ready is heard too."""
        session.add_output_listener(partial(self._on_output, None))

    def _on_output(self, job: Job | None, output: Output | Gap) -> None:
        """On the loop; what tasks say comes with their jobs, the rest with none."""
        self._echo.say(job, output)

    # --- stopping one job ----------------------------------------------------------------------

    def terminate_job(self, pid: int, signal: int | None = None) -> None:
        signum = int(signal or _TERM)
        job = pid.job() if isinstance(pid, ExecutionPid) else None
        if job is not None:
            self._terminate(job, signum)
        elif self._crew is not None and not isinstance(pid, ExecutionPid):
            self._runtime.post(self._terminate_pid, pid, signum)

    def _terminate(self, job: Job, signum: int) -> None:
        if self._crew is not None:
            self._runtime.post(self._crew.terminate, job, signum)

    def _terminate_pid(self, pid: int, signum: int) -> None:
        """On the runtime's loop."""
        crew = self._crew
        job = crew.job_of(pid) if crew is not None else None
        if crew is not None and job is not None:
            crew.terminate(job, signum)

    # --- size ----------------------------------------------------------------------------------

    def grow(self, n: int = 1) -> None:
        self._resize(self._size + n)
        if self._semaphore is not None:
            self._semaphore.grow(n)
        if self._slots is not None:
            self._slots.grow(n)

    def shrink(self, n: int = 1) -> None:
        """ValueError if fewer than `n` children are idle."""
        if n >= self._size:
            raise ValueError(f"can't shrink pool by {n}: it has {self._size} children")
        if self._crew is not None and self._crew.free_count() < n:
            raise ValueError("Can't shrink pool. All processes busy!")
        self._resize(self._size - n)
        if self._semaphore is not None:
            self._semaphore.shrink(n)
        if self._slots is not None:
            self._slots.shrink(n)

    def maintain_pool(self, *_: Any, **__: Any) -> None:
        """Nothing to do: a child's end is an event here."""

    @property
    def num_processes(self) -> int:
        return self._size

    def _resize(self, size: int) -> None:
        self._size = self.limit = size
        if self._crew is not None:
            self._runtime.post(self._crew.resize, "blocking", size)

    # --- looking -------------------------------------------------------------------------------

    def _get_info(self) -> dict[str, Any]:
        crew, sessions = self._crew, self._sessions
        if crew is None or sessions is None:
            return self._last_info or {**super()._get_info(), **settings(self.options, self._size)}
        return {
            **super()._get_info(),
            **settings(self.options, self._size),
            "put-guarded-by-semaphore": self.putlocks,
            "processes": [member.pid for member in members(crew)],
            "sessions": [describe(member) for member in members(crew)],
            "capsule": totals(crew, sessions, len(self._jobs)),
        }

    def health(self) -> dict[str, Any]:
        """The answer to `inspect capsule_health`."""
        if self._crew is None or self._sessions is None:
            return {"healthy": False, "reasons": ["the pool is not running"]}
        return health(self._crew, self._sessions, len(self._jobs))

    def stack_of(self, task_id: str) -> Later:
        """The answer to `inspect capsule_stack`, once the child has given it."""
        later = Later()
        if self._crew is None:
            self._bridge.put(partial(later.give, {"error": "the pool is not running"}))
        else:
            self._runtime.begin(self._ask_stack(self._crew, task_id, later))
        return later

    async def _ask_stack(self, crew: Crew, task_id: str, later: Later) -> None:
        self._bridge.put(partial(later.give, await stack(crew, task_id)))


_TERM = signal.SIGTERM


class _Refused:
    def __init__(self, name: str, task_id: str) -> None:
        self.name = name
        self.task_id = task_id
