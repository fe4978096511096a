"""The commands: each a few lines over `Execution` and `GroupExecution`."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import click

from capsule_tasks.cli import views
from capsule_tasks.cli.health import (
    destination_option,
    health,
    stack_by_inspect,
    timeout_option,
)
from capsule_tasks.cli.terminal import cleaned, without_controls
from capsule_tasks.client import Event, Execution, GroupExecution
from capsule_tasks.client.group import saved_group
from capsule_tasks.client.hub import hub
from capsule_tasks.errors import CapsuleError
from capsule_tasks.storage.execution_types import RecentEntry

_CLEAR = "\x1b[H\x1b[J"
_START = "\r\x1b[K"
_REFRESH_S = 0.5
_STATES = ("running", "waiting", "succeeded", "failed", "cancelled", "lost", "ignored", "rejected")

json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")


class _Commands(click.Group):
    """Tells this package's errors as a person should read them."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except CapsuleError as error:
            raise click.ClickException(str(error)) from error
        except (ValueError, TimeoutError, LookupError) as error:
            raise click.ClickException(str(error) or type(error).__name__) from error
        finally:
            _flush()


@click.group(cls=_Commands)
def capsule() -> None:
    """Watch, stop and answer executions; sessions: their health."""


capsule.add_command(health)


@capsule.command()
@click.argument("execution_id")
@click.option("--after", help="Only what was said after the event of this id.")
@click.option(
    "--group",
    "total",
    type=click.IntRange(min=1),
    help="It is the id of a group of so many members.",
)
@click.option("--raw", is_flag=True, help="Let terminal control sequences of the output pass.")
@json_option
@click.pass_context
def tail(
    ctx: click.Context,
    execution_id: str,
    after: str | None,
    total: int | None,
    raw: bool,
    as_json: bool,
) -> None:
    """Show what an execution says until it ends; of a group how far it is.

    The exit status is 0 if it succeeded, of a group if every member did.
    """
    app = _app(ctx)
    group = _group(app, execution_id, total)
    if group is not None:
        ctx.exit(_tail_group(group, as_json=as_json))
    narrator = views.Narrator(execution_id, raw=raw)
    last: Event | None = None
    for event in Execution(execution_id, app=app).events(after):
        last = event
        if as_json:
            click.echo(views.as_json(event))
        else:
            narrator.show(event)
        _flush()
    ctx.exit(views.exit_status(last))


def _group(app: Any, group_id: str, total: int | None) -> GroupExecution | None:
    if total is not None:
        return GroupExecution(group_id, total, app)
    saved = saved_group(app, group_id)
    return GroupExecution.of(saved) if saved is not None else None


def _tail_group(group: GroupExecution, *, as_json: bool) -> int:
    is_live = sys.stdout.isatty() and not as_json
    state = None
    for state in group.watch():
        if as_json:
            record = {"done": state.done, "total": state.total, "counts": state.counts}
            failures = [[failure.execution_id, failure.why] for failure in state.failures]
            click.echo(views.line_of({**record, "failures": failures}))
            continue
        for failure in state.failures:
            click.echo(f"{_START if is_live else ''}{views.failure_line(failure)}")
        click.echo(f"{_START}{views.bar(state)}" if is_live else views.bar(state), nl=not is_live)
        _flush()
    if is_live:
        click.echo()
    return views.group_status(state)


@capsule.command()
@click.argument("execution_ids", nargs=-1, required=True)
@click.option("--grace", "grace_s", type=float, help="Seconds until it is killed.")
@json_option
@click.pass_context
def cancel(
    ctx: click.Context, execution_ids: tuple[str, ...], grace_s: float | None, as_json: bool
) -> None:
    """Have executions stopped, begun or not; of a group that was saved, all its members."""
    app = _app(ctx)
    for execution_id in execution_ids:
        group = _group(app, execution_id, None)
        if group is None:
            asked: Any = Execution(execution_id, app=app).cancel(grace_s)
        else:
            counts = group.cancel(grace_s)
            asked = counts if as_json else ", ".join(f"{n} {how}" for how, n in counts.items())
        if as_json:
            click.echo(views.line_of({"id": execution_id, "cancel": asked}))
        else:
            click.echo(f"{execution_id}: {asked}")


@capsule.command()
@click.argument("execution_id")
@click.argument("text", required=False)
@click.option("--request", "request_id", help="The question, if several are open.")
@click.option("--eof", is_flag=True, help="End its input instead of answering.")
@json_option
@click.pass_context
def respond(
    ctx: click.Context,
    execution_id: str,
    text: str | None,
    request_id: str | None,
    eof: bool,
    as_json: bool,
) -> None:
    """Answer the question an execution asks; without TEXT it is asked for here."""
    execution = Execution(execution_id, app=_app(ctx))
    if text is None and not eof:
        question = execution.question()
        if question is None:
            raise click.ClickException(f"execution {execution_id} does not ask for input")
        prompt = cleaned(question.prompt) or "answer"
        text = click.prompt(prompt, hide_input=question.password, default="", show_default=False)
        request_id = request_id or question.id
    execution.respond(text or "", request_id=request_id, eof=eof)
    if as_json:
        click.echo(views.line_of({"id": execution_id, "respond": "asked"}))


@capsule.command()
@click.argument("execution_id")
@destination_option
@timeout_option
@json_option
@click.pass_context
def stack(
    ctx: click.Context,
    execution_id: str,
    destination: tuple[str, ...],
    timeout: float,
    as_json: bool,
) -> None:
    """Where the code of a running task is; status 1 if no worker runs it."""
    found = {} if destination else _stack_by_stream(_app(ctx), execution_id, timeout)
    found = found or stack_by_inspect(ctx, execution_id, destination, timeout)
    for name, text in found.items():
        if as_json:
            click.echo(views.line_of({"id": execution_id, "worker": name, "stack": text}))
        else:
            click.echo(f"{name}:\n{without_controls(text).rstrip()}")


def _stack_by_stream(app: Any, execution_id: str, timeout_s: float) -> dict[str, str]:
    """What the worker says that its stream tells of; nothing where it cannot be asked so."""
    execution = Execution(execution_id, app=app)
    try:
        snapshot = execution.snapshot()
        if snapshot.state != "running":
            return {}
        return {snapshot.worker: execution.stack(timeout_s)}
    except (CapsuleError, TimeoutError):
        return {}


@capsule.command()
@click.option("--state", type=click.Choice(_STATES))
@click.option("--task", help="Only of the task of this name.")
@click.option(
    "--since",
    "since_s",
    type=click.FloatRange(min=0, max=1e10),
    help="Only of the last so many seconds.",
)
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True)
@json_option
@click.pass_context
def ps(
    ctx: click.Context,
    state: str | None,
    task: str | None,
    since_s: float | None,
    limit: int,
    as_json: bool,
) -> None:
    """List recent executions, the latest first."""
    entries = hub.call(_recent(_app(ctx), state, task, since_s, limit))
    _show(entries, as_json=as_json)


@capsule.command()
@click.option("--limit", type=click.IntRange(1, 1000), default=30, show_default=True)
@json_option
@click.pass_context
def top(ctx: click.Context, limit: int, as_json: bool) -> None:
    """A live table of recent executions; when piped, one table."""
    app = _app(ctx)
    if as_json or not sys.stdout.isatty():
        _show(hub.call(_recent(app, None, None, None, limit)), as_json=as_json)
        return
    try:
        hub.call(_live(app, limit))
    except KeyboardInterrupt:
        click.echo()


async def _live(app: Any, limit: int) -> None:
    tower = await hub.tower(app)
    changed = asyncio.Event()
    await tower.bells.listen(tower.store.core.recent_channel, lambda _: changed.set())
    while True:
        changed.clear()
        entries = await tower.store.list_recent(limit=limit)
        click.echo(f"{_CLEAR}{views.table(entries)}")
        _flush()
        await asyncio.sleep(_REFRESH_S)
        if any(entry.state == "running" for entry in entries):
            await _or_after(changed, 1.0)  # their times go on
        else:
            await changed.wait()


async def _or_after(changed: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await changed.wait()
    except TimeoutError:
        return


async def _recent(
    app: Any, state: str | None, task: str | None, since_s: float | None, limit: int
) -> list[RecentEntry]:
    tower = await hub.tower(app)
    since = None
    if since_s is not None:
        since = time.time() - since_s
    return await tower.store.list_recent(state=state, task=task, since=since, limit=limit)


def _show(entries: list[RecentEntry], *, as_json: bool) -> None:
    if as_json:
        for entry in entries:
            click.echo(views.entry_json(entry))
    else:
        click.echo(views.table(entries))


def _app(ctx: click.Context) -> Any:
    """The app that Celery's command line was given."""
    return ctx.obj.app


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # it was closed by whoever began this
            stream.flush()
