"""All parts of a pool that live on the runtime's loop: sessions, executions, streams."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Hashable
from functools import partial
from typing import Any

import click
from celery.signals import task_revoked
from msgspec.structs import replace

from capsule_tasks.child.executors import celery_app
from capsule_tasks.client.configuration import setting
from capsule_tasks.client.sessions.as_task import SESSION_TASK
from capsule_tasks.executions.execution import Execution
from capsule_tasks.executions.lifecycle import Lifecycle
from capsule_tasks.executions.origin import Origin
from capsule_tasks.executions.supervisor import Supervisor
from capsule_tasks.protocol.messages import Gap, Output, TaskCall
from capsule_tasks.sessions import SessionPool
from capsule_tasks.sessions.process.template import Template, TemplateSpawner
from capsule_tasks.sessions.session import Session
from capsule_tasks.sessions.states import SessionState
from capsule_tasks.settings import Profile
from capsule_tasks.system.descriptors import is_kept, targets
from capsule_tasks.system.portable import IS_LINUX
from capsule_tasks.taskpool.code.hosting import make_host
from capsule_tasks.taskpool.code.runner import CodeRunner
from capsule_tasks.taskpool.hub import RuntimeThread
from capsule_tasks.taskpool.options import lane_settings, loss_counter_of, make_publisher, profile
from capsule_tasks.taskpool.reporting.output_log import FinishedTask, OutputLog
from capsule_tasks.taskpool.reporting.reporter import group_of
from capsule_tasks.taskpool.run_keeper import make_run_keeper

log = logging.getLogger("capsule_tasks.taskpool")

_IGNORED = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")


class PoolRuntime:
    """Started and stopped as one; methods are for the hub thread unless they say otherwise."""

    def __init__(self, app: Any, options: dict[str, Any], thread: RuntimeThread) -> None:
        """Take the template now: every child starts with the state that this process has now."""
        self._app = app
        self._thread = thread
        self._hostname = options["initargs"][1]
        self.output_log = OutputLog(app)
        self._profiles: dict[str, Profile] = {
            kind: profile(
                app,
                lane_settings(
                    app,
                    self._hostname,
                    kind=kind,
                    async_limit=setting(app, "capsule_async_limit"),
                    async_threads=setting(app, "capsule_async_threads"),
                    log_file=os.environ.get("CELERY_LOG_FILE") or None,
                    log_level=int(os.environ.get("CELERY_LOG_LEVEL") or 0),
                    log_color=_is_log_coloured(),
                ),
                options,
            )
            for kind in ("blocking", "async")
        }
        self._inheritance = DescriptorCheck(app)
        self._spawner = TemplateSpawner(self._profiles["blocking"], _template(app))
        self.sessions = SessionPool(self._profiles, spawner=self._spawner, on_new=self._listen)
        self.publisher = make_publisher(app, self._hostname)
        self.supervisor = Supervisor(
            self.sessions,
            async_limit=setting(app, "capsule_async_limit"),
            publisher=self.publisher,
            losses=loss_counter_of(app),
            output_log=self.output_log,
        )
        self.dispatcher = self.supervisor.dispatcher
        self.code = CodeRunner(app, self._hostname, self.supervisor)
        self.host = make_host(app, self.publisher, self.supervisor, self.code.lanes)
        self.session_calls = self.code.session_calls
        self.run_keeper = make_run_keeper(app)
        if self.run_keeper is not None and self.publisher is not None:
            self.publisher.reaper.after_lost_attempt = self.run_keeper.after_lost_attempt
        self._reloading = asyncio.Lock()
        self._names = set(app.tasks)
        """Names of the tasks that children know."""
        self.last_error = ""
        self._is_closed = False

    async def start(self, size: int) -> None:
        """On the loop, once."""
        self.output_log.start()
        await self._spawner.start()
        await self.sessions.start()
        self.dispatcher.resize("blocking", size)
        await self.supervisor.start()
        if self.publisher is not None:
            task_revoked.connect(self._on_revoked)
        if self.host is not None:
            await self.host.start()
        if self.run_keeper is not None:
            await self.run_keeper.start()

    async def stop(self, grace_s: float = 0.0) -> None:
        """On the loop, once: stop every part, also when another one fails to stop.

        Calls of named sessions that run may end within the grace.
        """
        self._is_closed = True
        async with contextlib.AsyncExitStack() as stack:  # each is stopped, even if another fails
            stack.push_async_callback(self._spawner.stop)
            stack.push_async_callback(self.sessions.stop)
            stack.push_async_callback(self.code.stop)
            stack.push_async_callback(self.supervisor.stop)
            if self.host is not None:
                stack.push_async_callback(self.host.stop, grace_s)
            if self.run_keeper is not None:
                stack.push_async_callback(self.run_keeper.stop)
            task_revoked.disconnect(self._on_revoked)

    def requeue_waiting(self) -> None:
        """Drop tasks that no child has: their messages are redelivered."""
        self.supervisor.requeue_waiting()
        self.session_calls.requeue_all()

    # --- new code ------------------------------------------------------------------------------

    def restart(self) -> None:
        """Replace the children by ones that import the app again; nothing that runs is lost.

        Celery has reloaded the modules of the worker itself, if asked to. If the new children
        cannot import the app, because of an edit half saved, say, the pool keeps its children.
        """
        # The children import all modules that the worker imported.
        modules = {type(task).__module__ for task in self._app.tasks.values()}
        include = sorted(modules.union(self._app.loader.task_modules, self._app.conf.include))
        profiles = {kind: _reloaded(old, include) for kind, old in self._profiles.items()}
        new = set(self._app.tasks) - self._names
        self._thread.post(self.supervisor.expect_tasks, new)
        self._thread.start_coroutine(self._reload(profiles, new))

    async def _reload(self, profiles: dict[str, Profile], new: set[str]) -> None:
        async with self._reloading:
            try:
                lane = profiles["blocking"].session.child.tasks
                if lane is not None and not lane.app:
                    log.warning(
                        "the app is in no importable module: new children have the same code"
                    )
                    self.dispatcher.replace_all("the pool was restarted")
                elif await self._start_reloaded(profiles):
                    self._names |= new
            except Exception:
                log.exception("the pool was not restarted, or only in part")
            finally:
                self.supervisor.tasks_known(new)

    async def _start_reloaded(self, profiles: dict[str, Profile]) -> bool:
        """Have children started from the code as it is now; False if that fails."""
        try:
            spawner = await self._start_trial_child(profiles["blocking"])
        except Exception as fault:  # noqa: BLE001 - the new code may raise anything
            why = "\n".join((str(fault), *getattr(fault, "__notes__", ())))
            self.last_error = f"the pool was not restarted, and goes on as it was: {why}"
            log.error("%s", self.last_error)  # noqa: TRY400 - the text has the traceback of the child
            return False
        if self._is_closed:
            await spawner.stop()
            return False
        old, self._spawner = self._spawner, spawner
        self.sessions.renew(spawner, profiles)
        try:
            await old.stop()
        except Exception:
            log.exception("the old template did not stop cleanly")
        self.last_error = ""
        return True

    async def _start_trial_child(self, profile: Profile) -> TemplateSpawner:
        """Return a spawner of such children once one was ready; raise the error of its start."""
        spawner = TemplateSpawner(profile)
        try:
            await spawner.start()
            session = Session(profile.session, spawner=spawner)
            self._listen(session)
            try:
                await session.start()
            finally:
                await session.terminate()
        except BaseException:
            await spawner.stop()
            raise
        return spawner

    # --- discarded tasks -----------------------------------------------------------------------

    def _on_revoked(
        self, sender: Any, request: Any, terminated: bool, expired: bool, **_: Any
    ) -> None:
        """Celery discards a task before it reaches the pool, because it is revoked or expired.

        It gets an end in its stream and is counted in its group, as if it had been cancelled here.
        """
        if terminated or sender.app is not self._app:  # a terminated task has been in the pool
            return
        group, index = group_of(vars(request))
        if sender.name == SESSION_TASK:  # whoever runs the code is the only writer of its stream
            self._thread.post(self.session_calls.discard, request.id, (group, index))
            return
        origin = Origin(
            execution_id=request.id,
            task=sender.name,
            group=group,
            index=index,
            acks_late=bool(sender.acks_late),
            claims_with_output=getattr(sender, "capsule_claims_with_output", False),
        )
        why = "expired" if expired else "revoked"
        if origin.claims_with_output:
            self._thread.post(self.cancel_run, request.id, f"its task, which was {why}")
        call = TaskCall(name=sender.name, task_id=request.id, request={}, body=b"")
        execution = Execution(call, Lifecycle(origin))
        self._thread.post(self.supervisor.discard, execution, why)

    def cancel_run(self, run_id: str, by: str) -> None:
        """On the loop: cancel a durable run whose task has ended without it."""
        if self.run_keeper is not None:
            self.run_keeper.cancel(run_id, by)

    # --- output --------------------------------------------------------------------------------

    def _listen(self, session: Session) -> None:
        """Log the output of a new session, also during its start, and check its descriptors."""
        session.add_output_listener(partial(self._on_output, session))

        def on_ready(*_: object) -> None:
            session.remove_state_listener(on_ready)
            if (pid := session.info.pid) is not None:
                spawner = self._spawner
                origin = (spawner, spawner.templates_lost, spawner.cold_starts > 0)
                self._inheritance.check(pid, origin)

        session.add_state_listener(on_ready, frozenset({SessionState.READY}))

    def _on_output(self, session: Session, output: Output | Gap) -> None:
        """On the loop: output that belongs to no running task."""
        late = isinstance(output, Output) and output.late
        known = FinishedTask(output.execution_id or "", session.info.pid or 0) if late else None
        self.output_log.write(known, output)


class DescriptorCheck:
    """Warns when children lack files and pipes that the worker had open when this was made.

    A fork of the worker has them, as under prefork. A child that imports the app afresh has only
    what the import opens.
    """

    def __init__(self, app: Any) -> None:
        self._opened = _opened(app) if IS_LINUX else {}
        self._checked: Hashable = None
        self._missing: set[str] = set()

    def check(self, pid: int, origin: Hashable) -> None:
        """Compare a child that is ready with the worker; `origin` is what children come from.

        One child of each origin is checked, and a descriptor is named once.
        """
        if not self._opened or origin == self._checked:
            return
        self._checked = origin
        try:
            has = set(targets(pid).values())
        except OSError:  # the child has ended, or reading is not permitted
            return
        still_open = targets()
        missed = {
            number: target
            for number, target in self._opened.items()
            if still_open.get(number) == target and target not in has | self._missing
        }
        if missed:
            self._missing |= set(missed.values())
            log.warning(
                "children import the app afresh and do not have what this worker has open: %s. "
                "Open it when the app is imported, or in worker_process_init",
                ", ".join(f"{target} (descriptor {n})" for n, target in sorted(missed.items())),
            )


def _opened(app: Any) -> dict[int, str]:
    """The app's own: neither the standard streams nor what Celery keeps in its main process."""
    found = targets()
    others = {found.get(number) for number in (0, 1, 2)}.union(_IGNORED)
    state_db = _state_db(app)
    return {
        number: target
        for number, target in found.items()
        if is_kept(number, target)
        and target not in others
        and not (state_db and target.startswith(state_db))
    }


def _state_db(app: Any) -> str:
    """The path of `--statedb`, which its files begin with."""
    context = click.get_current_context(silent=True)
    path = (context and context.params.get("statedb")) or app.conf.worker_state_db
    return os.path.realpath(path) if path else ""


def _is_log_coloured() -> bool:
    """Whether Celery decided for colours when it set up logging."""
    err = sys.__stderr__  # `sys.stderr` may be redirected into the log by now
    formatters = [handler.formatter for handler in logging.getLogger().handlers]
    is_asked_for = any(getattr(formatter, "use_color", None) for formatter in formatters)
    has_terminal = err is not None and err.isatty()
    return is_asked_for and has_terminal and not os.environ.get("CELERY_LOG_FILE")


def _template(app: Any) -> Template | None:
    if setting(app, "capsule_start") != "fork" or not IS_LINUX:
        return None
    others = [t.name for t in threading.enumerate() if t is not threading.current_thread()]
    if others:
        log.info("the worker is forked while other threads run: %s", ", ".join(others))
    celery_app.keep_app_for_forks(app)
    # Prefork forks as well, and the threads are of modules that the app itself imports.
    return Template.fork_of_caller()


def _reloaded(profile: Profile, include: list[str]) -> Profile:
    """The profile of children that import the app again, with these modules."""
    child = profile.session.child
    assert child.tasks is not None
    conf = {**child.tasks.conf, "include": include}
    child = replace(child, tasks=replace(child.tasks, conf=conf, is_reloaded=True))
    return replace(profile, session=replace(profile.session, child=child))
