"""`celery capsule runs …`: durable runs from a terminal or a script."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import click
import msgspec

from capsule_tasks.cli import run_views, views
from capsule_tasks.cli.commands import Commands, capsule
from capsule_tasks.cli.options import app_of, command_line, json_option
from capsule_tasks.cli.terminal import cleaned
from capsule_tasks.client import Event
from capsule_tasks.client.runs.handle import RunHandle
from capsule_tasks.client.runs.registry import Runs, runs_of
from capsule_tasks.errors import RunEnded, RunNotFound
from capsule_tasks.protocol.events import AttemptEnded
from capsule_tasks.storage.runs.types import Status

_NOT_ENDED = 1
limit_option = click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True)


@capsule.group(cls=Commands)
@json_option
def runs(as_json: bool) -> None:
    """List, watch, decide and cancel durable runs of agents."""


def _runs(ctx: click.Context) -> Runs:
    return runs_of(app_of(ctx))


def _run(ctx: click.Context, run_id: str) -> RunHandle:
    return _runs(ctx).get(run_id)


@runs.command("list")
@click.option("--status", type=click.Choice(get_args(Status)), help="Only runs with this status.")
@click.option("--agent", help="Only runs of the agent that is registered under this name.")
@click.option("--session", help="Only runs of this session.")
@limit_option
@json_option
@click.pass_context
def list_runs(
    ctx: click.Context,
    status: Status | None,
    agent: str | None,
    session: str | None,
    limit: int,
    as_json: bool,
) -> None:
    """List runs, those whose status changed last first."""
    for info in _runs(ctx).list(status=status, agent=agent, session=session, limit=limit):
        click.echo(run_views.run_json(info) if as_json else run_views.run_row(info))


@runs.command()
@click.option("--agent", help="Only calls of the agent with this name of its own.")
@click.option("--tool", help="Only calls of this tool: refund, or hosted_mcp:shop/pay.")
@limit_option
@json_option
@click.pass_context
def pending(
    ctx: click.Context, agent: str | None, tool: str | None, limit: int, as_json: bool
) -> None:
    """List the calls of all runs that wait for a person, oldest first."""
    for call in _runs(ctx).pending(agent=agent, tool=tool, limit=limit):
        click.echo(run_views.call_json(call) if as_json else run_views.call_row(call))


@runs.command()
@click.argument("run_id")
@json_option
@click.pass_context
def show(ctx: click.Context, run_id: str, as_json: bool) -> None:
    """Show a run: its status, what it waits for, what it has used, how it ended."""
    info = _run(ctx, run_id).state()
    click.echo(run_views.run_json(info) if as_json else run_views.run_details(info))


def _decision(function: Callable[..., None]) -> click.Command:
    """A command that decides about a call of a run, in the name of a person."""
    for option in (
        click.pass_context,
        json_option,
        click.option("--role", "roles", multiple=True, help="A role of the person; also several."),
        click.option("--by", help="The person who decides. [default: this user and host]"),
        click.argument("call_id"),
        click.argument("run_id"),
    ):
        function = option(function)
    return runs.command()(function)


@_decision
@click.option("--always", is_flag=True, help="Approve later calls of this tool in this run, too.")
def approve(
    ctx: click.Context, run_id: str, call_id: str, always: bool, as_json: bool, **person: Any
) -> None:
    """Approve a call that a run waits for; the first decision counts."""
    status = _run(ctx, run_id).approve(call_id, always=always, **person)
    _report(run_id, status, as_json=as_json, call_id=call_id, decision="approved")


@_decision
@click.option("-m", "--message", help="The reason, for the model.")
@click.option("--always", is_flag=True, help="Reject later calls of this tool in this run, too.")
def reject(
    ctx: click.Context,
    run_id: str,
    call_id: str,
    message: str | None,
    always: bool,
    as_json: bool,
    **person: Any,
) -> None:
    """Reject a call that a run waits for; the first decision counts."""
    status = _run(ctx, run_id).reject(call_id, message=message, always=always, **person)
    _report(run_id, status, as_json=as_json, call_id=call_id, decision="rejected")


@_decision
@click.option("--made/--not-made", default=None, help="Whether it was made.")
@click.option("--output", help="What the call returned, as JSON.")
def settle(
    ctx: click.Context,
    run_id: str,
    call_id: str,
    made: bool | None,
    output: str | None,
    as_json: bool,
    **person: Any,
) -> None:
    """Say whether a call was made that a dead worker had started.

    The run makes a call that was not made.
    """
    if made is None:
        raise click.UsageError("say --made or --not-made")
    try:
        value = None if output is None else msgspec.json.decode(output)
    except msgspec.DecodeError as fault:
        raise click.UsageError(f"--output {cleaned(output or '')!r} is not JSON: {fault}") from None
    status = _run(ctx, run_id).settle(call_id, made=made, output=value, **person)
    decision = "made" if made else "not made"
    _report(run_id, status, as_json=as_json, call_id=call_id, decision=decision)


@runs.command()
@click.argument("run_ids", nargs=-1, required=True)
@click.option("--by", help="The person who cancels. [default: this user and host]")
@json_option
@click.pass_context
def cancel(ctx: click.Context, run_ids: tuple[str, ...], by: str | None, as_json: bool) -> None:
    """Cancel runs, whether they run, wait or are queued.

    A run that a worker drives is `running` until that worker has ended it. The exit status is 1 if
    a run is unknown, or had ended in another way.
    """
    exit_status = 0
    for run_id in run_ids:
        try:
            status = str(_run(ctx, run_id).cancel(by=by))
        except RunNotFound:
            status, exit_status = "unknown", 1
        except RunEnded as ended:
            status, exit_status = ended.status, 1
        _report(run_id, status, as_json=as_json)
    ctx.exit(exit_status)


@runs.command()
@click.argument("run_id")
@click.option("--after", help="Show only events after the one with this id.")
@click.option("--raw", is_flag=True, help="Do not filter control sequences out of the output.")
@click.option(
    "--no-wait",
    is_flag=True,
    help="Do not wait for a worker or for a person: exit with status 1.",
)
@json_option
@click.pass_context
def tail(
    ctx: click.Context, run_id: str, after: str | None, raw: bool, no_wait: bool, as_json: bool
) -> None:
    """Show what a run does until it ends: what the agent says, its tool calls, what it waits for.

    The exit status is 0 if the run has completed.
    """
    run = _run(ctx, run_id)
    if not run.execution.tail(1):
        click.echo(f"-- {run_views.run_row(run.state())}", err=True)
        if no_wait:
            ctx.exit(_NOT_ENDED)
    respond_with = f"{command_line(ctx, 'respond', run_id)} TEXT"
    printer = run_views.RunPrinter(views.EventPrinter(respond_with=respond_with, raw=raw))
    last = None
    for event in run.events(after):
        last = event
        if as_json:
            click.echo(views.as_json(event))
        else:
            printer.show(event)
        if isinstance(event.message, AttemptEnded) and _is_last(run, event):
            if not as_json:
                printer.waits(run.state(), partial(command_line, ctx))
            if no_wait:
                ctx.exit(_NOT_ENDED)
    ctx.exit(views.exit_status(last))


def _is_last(run: RunHandle, event: Event) -> bool:
    """Whether nothing has followed the event yet; a run goes on after a decision."""
    return [each.id for each in run.execution.tail(1)] == [event.id]


def _report(run_id: str, status: str, *, as_json: bool, **about: str) -> None:
    if as_json:
        click.echo(views.format_line({"id": run_id, **about, "status": status}))
        return
    decided = f"{cleaned(about['call_id'])} {about['decision']}, " if about else ""
    click.echo(f"{cleaned(run_id)}: {decided}{status}")
