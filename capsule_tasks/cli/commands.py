"""The commands of `celery capsule`: each a few lines over `Execution` and `GroupExecution`."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from typing import Any

import click
from celery.exceptions import OperationalError

from capsule_tasks.cli import views
from capsule_tasks.cli.broker import Queues, connected
from capsule_tasks.cli.options import Duration, Unavailable, app_of, command_line, json_option
from capsule_tasks.cli.terminal import cleaned, without_controls
from capsule_tasks.client import Event, Execution, GroupExecution, GroupState
from capsule_tasks.client.cancelling import cancel_all
from capsule_tasks.client.group import saved_group, saved_groups
from capsule_tasks.client.redis_location import redis_url
from capsule_tasks.client.watching.watch_thread import watch_thread
from capsule_tasks.errors import CapsuleError, StorageNotReady, StorageUnavailable
from capsule_tasks.protocol.events import Outcome
from capsule_tasks.storage.executions.types import RecentEntry
from capsule_tasks.taskpool import remote_commands  # noqa: F401 - registers them for `celery inspect`

_MIN_REFRESH_S = 0.5
_IDLE_REFRESH_S = 1.0
_NOT_STARTED = 1
_UNHEALTHY = 1
_STATES = ("queued", "running", "waiting", *(outcome.value for outcome in Outcome))

destination_option = click.option(
    "-d", "--destination", multiple=True, metavar="NODE", help="Ask only these workers."
)
timeout_option = click.option(
    "-t", "--timeout", type=float, default=2.0, show_default=True, help="Seconds to wait."
)
queues_option = click.option(
    "-Q", "--queues", default="", metavar="NAMES", help="Count these queues (comma-separated)."
)


class Commands(click.Group):
    """Shows errors of this package as one line, without a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (StorageUnavailable, StorageNotReady, OperationalError) as error:
            raise Unavailable(str(error)) from error
        except (CapsuleError, ValueError, TimeoutError, LookupError) as error:
            raise click.ClickException(str(error) or type(error).__name__) from error


@click.group(cls=Commands)
@json_option
def capsule(as_json: bool) -> None:
    """Watch, stop and answer executions; check the health of workers."""


def _command(function: Callable[..., None]) -> click.Command:
    """A command with `--json`, which is called with its context."""
    return capsule.command()(json_option(click.pass_context(function)))


@_command
@click.argument("execution_id")
@click.option("--after", help="Show only events after the one with this id.")
@click.option(
    "--group",
    "total",
    type=click.IntRange(min=1),
    help="EXECUTION_ID is the id of a group with this many members.",
)
@click.option("--raw", is_flag=True, help="Do not filter control sequences out of the output.")
@click.option(
    "--no-wait",
    is_flag=True,
    help="Do not wait for the start of an execution, or the end of a group: exit with status 1.",
)
def tail(
    ctx: click.Context,
    execution_id: str,
    after: str | None,
    total: int | None,
    raw: bool,
    no_wait: bool,
    as_json: bool,
) -> None:
    """Show the events of an execution until it ends, or the progress of a group.

    If no worker has started the execution, the command waits, and says so on standard error. The
    exit status is 0 if the execution, or every member of the group, succeeded.
    """
    app = app_of(ctx)
    group = _group(app, execution_id, total)
    if group is not None:
        ctx.exit(_tail_group(group, as_json=as_json, no_wait=no_wait))
    execution = Execution(execution_id, app=app)
    if execution.snapshot().state == "unknown":
        waits = "" if no_wait else "; waiting"
        click.echo(f"-- {_not_started(execution_id)}{waits}", err=True)
        if no_wait:
            ctx.exit(_NOT_STARTED)
    respond_with = f"{command_line(ctx, 'respond', execution_id)} TEXT"
    printer = views.EventPrinter(respond_with=respond_with, raw=raw)
    last: Event | None = None
    for event in execution.events(after):
        last = event
        if as_json:
            click.echo(views.as_json(event))
        else:
            printer.show(event)
    ctx.exit(views.exit_status(last))


def _not_started(which: str) -> str:
    """Queues are not searched: the task message of an unknown id may still be in one."""
    which = cleaned(which)
    return f"no worker has started {which}, or the stream is missing (expired or not stored)"


def _group(app: Any, group_id: str, total: int | None) -> GroupExecution | None:
    if total is not None:
        return GroupExecution(group_id, total, app)
    saved = saved_group(app, group_id)
    return GroupExecution.of(saved) if saved is not None else None


def _tail_group(group: GroupExecution, *, as_json: bool, no_wait: bool) -> int:
    from capsule_tasks.cli import screen

    states: Iterable[GroupState] = [group.snapshot()] if no_wait else group.watch()
    is_live = not as_json and screen.can_redraw()
    state = None
    for state in screen.with_progress(states) if is_live else states:
        if as_json:
            record = {"done": state.done, "total": state.total, "counts": state.counts}
            failures = [[failure.execution_id, failure.reason] for failure in state.failures]
            click.echo(views.format_line({**record, "failures": failures}))
        elif not is_live:
            for failure in state.failures:
                click.echo(views.failure_line(failure))
            click.echo(views.bar(state))
    return views.group_status(state)


@_command
@click.argument("execution_ids", nargs=-1, required=True)
@click.option("--grace", "grace_s", type=float, help="Seconds until the child is killed.")
def cancel(
    ctx: click.Context, execution_ids: tuple[str, ...], grace_s: float | None, as_json: bool
) -> None:
    """Cancel executions, started or not; the id of a saved group cancels all its members."""
    app = app_of(ctx)
    groups = saved_groups(app, execution_ids)
    single = [each for each in execution_ids if each not in groups]
    answers: dict[str, Any] = dict(watch_thread.call(cancel_all(app, single, grace_s)))
    pending = [each for each in single if answers[each] == "pending"]
    unknown = watch_thread.call(_unknown(app, pending)) if pending else []
    for group_id, group in groups.items():
        answers[group_id] = GroupExecution.of(group).cancel(grace_s)
    for execution_id in dict.fromkeys(execution_ids):
        answer = answers[execution_id]
        if as_json:
            click.echo(views.format_line({"id": execution_id, "cancel": answer}))
            continue
        if execution_id in groups:
            answer = ", ".join(f"{count} {how}" for how, count in answer.items())
        click.echo(f"{cleaned(execution_id)}: {answer}")
    if unknown:
        which = unknown[0] if len(unknown) == 1 else f"{len(unknown)} executions"
        click.echo(f"-- {_not_started(which)}; the cancel applies at the start", err=True)


async def _unknown(app: Any, ids: list[str]) -> list[str]:
    """The executions without a stream; pending executions with one wait for their next attempt."""
    if redis_url(app) is None:
        return []
    states = await (await watch_thread.watcher(app)).states(ids)
    return [execution_id for execution_id, state in states.items() if state == "unknown"]


@_command
@click.argument("execution_id")
@click.argument("text", required=False)
@click.option("--request", "request_id", help="Id of the question, if several are open.")
@click.option("--eof", is_flag=True, help="End the input of the execution instead of answering.")
def respond(
    ctx: click.Context,
    execution_id: str,
    text: str | None,
    request_id: str | None,
    eof: bool,
    as_json: bool,
) -> None:
    """Answer a question of an execution; without TEXT, prompt for the answer."""
    execution = Execution(execution_id, app=app_of(ctx))
    if text is None and not eof:
        question = execution.question()
        if question is None:
            raise click.ClickException(f"execution {execution_id} has no open question")
        prompt = cleaned(question.prompt) or "answer"
        text = click.prompt(prompt, hide_input=question.password, default="", show_default=False)
        request_id = request_id or question.id
    execution.respond(text or "", request_id=request_id, eof=eof)
    if as_json:
        click.echo(views.format_line({"id": execution_id, "respond": "requested"}))


@_command
@click.argument("execution_id")
@destination_option
@timeout_option
@click.option(
    "--all",
    "all_frames",
    is_flag=True,
    help="Include the frames that called the task, and threads that run none of its code.",
)
def stack(
    ctx: click.Context,
    execution_id: str,
    destination: tuple[str, ...],
    timeout: float,
    all_frames: bool,
    as_json: bool,
) -> None:
    """Show where the code of a running task is; status 1 if no worker runs the task."""
    execution = Execution(execution_id, app=app_of(ctx))
    found = {} if destination else _stack_by_stream(execution, timeout, all_frames=all_frames)
    if not found:
        wanted = {"task_id": execution_id, "all_frames": all_frames}
        replies = _ask(ctx, destination, timeout, "capsule_stack", **wanted)
        found = {name: reply["ok"] for name, reply in replies.items() if "ok" in reply}
        if not found:
            reasons = {reply["error"] for reply in replies.values() if "error" in reply}
            raise click.ClickException(_why_no_stack(execution, sorted(reasons)))
    for name, text in found.items():
        if as_json:
            click.echo(views.format_line({"id": execution_id, "worker": name, "stack": text}))
        else:
            click.echo(f"{name}:\n{without_controls(text).rstrip()}")


def _why_no_stack(execution: Execution, reasons: list[str]) -> str:
    try:
        snapshot = execution.snapshot()
    except CapsuleError:  # without streams, only the workers know
        return "; ".join(reasons)
    match snapshot.state:
        case "unknown":
            return _not_started(execution.id)
        case "waiting":
            return f"execution {cleaned(execution.id)} waits for its next attempt"
        case "ended":
            return f"execution {cleaned(execution.id)} has ended: {snapshot.outcome}"
    return "; ".join(reasons)


def _stack_by_stream(execution: Execution, timeout_s: float, *, all_frames: bool) -> dict[str, str]:
    """The stack from the worker that the stream names; empty if the stream cannot be used."""
    try:
        snapshot = execution.snapshot()
        if snapshot.state != "running":
            return {}
        return {snapshot.worker: execution.stack(timeout_s, all_frames=all_frames)}
    except (CapsuleError, TimeoutError):
        return {}


def _ask(
    ctx: click.Context, destination: tuple[str, ...], timeout: float, command: str, **arguments: Any
) -> dict[str, Any]:
    """The reply of each worker to a remote command; exits with status 69 if there is none."""
    app = app_of(ctx)
    with connected(app) as connection:
        inspect = app.control.inspect(
            destination=list(destination) or None,
            timeout=timeout,
            connection=connection,
            limit=len(destination) or None,
        )
        replies: dict[str, Any] = inspect._request(command, **arguments) or {}  # noqa: SLF001 - as Celery's own commands do
    if not replies:
        raise Unavailable("no worker replied")
    return replies


@_command
@destination_option
@timeout_option
def health(ctx: click.Context, destination: tuple[str, ...], timeout: float, as_json: bool) -> None:
    """Show whether each worker can run tasks.

    The exit status is 1 if a worker cannot, 69 if no worker replies or the broker is unavailable.
    """
    replies = _ask(ctx, destination, timeout, "capsule_health")
    for name, reply in sorted(replies.items()):
        if as_json:
            click.echo(views.format_line({"worker": name, **reply}))
            continue
        reasons = reply.get("reasons") or [reply["error"]] if not reply.get("healthy") else []
        children = len(reply.get("sessions", ()))
        click.echo(f"{name}: {'; '.join(reasons) or f'healthy, {children} sessions'}")
    if not all(reply.get("healthy") for reply in replies.values()):
        ctx.exit(_UNHEALTHY)


@_command
@click.option("--state", type=click.Choice(_STATES), help="Only executions in this state.")
@click.option("--task", help="Only executions of the task with this name.")
@click.option(
    "--since",
    "since_s",
    type=Duration(),
    help="Only executions of the last DURATION: seconds, or 90s, 15m, 1h, 2d.",
)
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True)
@queues_option
def ps(
    ctx: click.Context,
    state: str | None,
    task: str | None,
    since_s: float | None,
    limit: int,
    queues: str,
    as_json: bool,
) -> None:
    """List recent executions, the latest first, and how many messages wait in the queues.

    Queues are not shown with --task, or with a --state other than `queued`.
    """
    app = app_of(ctx)
    if state == "queued":
        with contextlib.closing(Queues(app, queues)) as waiting:
            _show({} if task else waiting.lengths(), [], as_json=as_json)
        return
    entries = watch_thread.call(_recent(app, state, task, since_s, limit))
    lengths = {} if task or state else _lengths_or_warning(app, queues)
    _show(lengths, entries, as_json=as_json)


@_command
@click.option("--limit", type=click.IntRange(1, 1000), default=30, show_default=True)
@queues_option
def top(ctx: click.Context, limit: int, queues: str, as_json: bool) -> None:
    """Show a live table of recent executions and queues; in a pipe, one table."""
    from capsule_tasks.cli import screen

    app = app_of(ctx)
    if as_json or not screen.can_redraw():
        entries = watch_thread.call(_recent(app, None, None, None, limit))
        _show(_lengths_or_warning(app, queues), entries, as_json=as_json)
        return
    with contextlib.suppress(KeyboardInterrupt), screen.FullScreen() as display:
        watch_thread.call(_live(app, limit, Queues(app, queues), display.draw))


async def _live(app: Any, limit: int, queues: Queues, draw: Callable[..., None]) -> None:
    watcher = await watch_thread.watcher(app)
    changed = asyncio.Event()
    await watcher.bells.listen(watcher.store.recent_channel, lambda _: changed.set())
    while True:
        changed.clear()
        entries = await watcher.store.list_recent(limit=limit)
        draw(*await asyncio.to_thread(queues.known_lengths), entries)
        await asyncio.sleep(_MIN_REFRESH_S)
        # No doorbell rings for a queue, or for the time that a task has been running.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(changed.wait(), _IDLE_REFRESH_S)


async def _recent(
    app: Any, state: str | None, task: str | None, since_s: float | None, limit: int
) -> list[RecentEntry]:
    watcher = await watch_thread.watcher(app)
    since = None if since_s is None else time.time() - since_s
    return await watcher.store.list_recent(state=state, task=task, since=since, limit=limit)


def _lengths_or_warning(app: Any, names: str) -> dict[str, int | None]:
    """The lengths of the queues; a broker that is unavailable is a warning on standard error."""
    with contextlib.closing(Queues(app, names)) as queues:
        lengths, warnings = queues.known_lengths()
    for warning in warnings:
        click.echo(warning, err=True)
    return lengths


def _show(lengths: dict[str, int | None], entries: list[RecentEntry], *, as_json: bool) -> None:
    if as_json:
        for queue, length in lengths.items():
            click.echo(views.queued_json(queue, length))
        for entry in entries:
            click.echo(views.entry_json(entry))
        return
    from capsule_tasks.cli import screen

    if lengths:
        click.echo(views.queued_line(lengths))
    screen.print_table(entries)
