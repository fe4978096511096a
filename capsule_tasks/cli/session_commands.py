"""`celery capsule shell` and `celery capsule sessions …`: named sessions from a terminal."""

from __future__ import annotations

from typing import Any

import click

from capsule_tasks.cli import views
from capsule_tasks.cli.commands import Commands, capsule
from capsule_tasks.cli.options import app_of, json_option
from capsule_tasks.cli.shell import ShellTarget
from capsule_tasks.cli.terminal import cleaned
from capsule_tasks.client import NamedSession
from capsule_tasks.client.sessions.forgetting import forget_session, forget_tenant
from capsule_tasks.client.sessions.named_session import DEFAULT_PROFILE
from capsule_tasks.client.watching.watch_thread import watch_thread
from capsule_tasks.errors import SessionUnknown
from capsule_tasks.sessions.console import Console
from capsule_tasks.storage.sessions.types import NamedSessionInfo


@capsule.command()
@click.argument("session_id")
@click.option("--profile", help="Of a session that is new. [default: sandbox]")
@click.option("--tenant", help="Of a session that is new.")
@click.pass_context
def shell(ctx: click.Context, session_id: str, profile: str | None, tenant: str | None) -> None:
    """Run code in a named session by hand: type it, or pipe it in.

    The session lives on when the prompt is left. With a pipe the exit status is 1 if the last
    execution failed.
    """
    app = app_of(ctx)
    if profile is None:
        known = _known(app, session_id)
        profile = known.profile if known is not None else DEFAULT_PROFILE
    session = NamedSession(app, session_id, profile=profile, tenant=tenant)
    ctx.exit(Console(ShellTarget(session)).main())


def _known(app: Any, session_id: str) -> NamedSessionInfo | None:
    try:
        return NamedSession(app, session_id).info()
    except SessionUnknown:
        return None


@capsule.group(cls=Commands)
@json_option
def sessions(as_json: bool) -> None:
    """List, inspect, close and erase named sessions."""


@sessions.command("list")
@click.option("--profile", help="Only sessions of this profile.")
@click.option("--tenant", help="Only sessions of this tenant.")
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True)
@json_option
@click.pass_context
def list_sessions(
    ctx: click.Context, profile: str | None, tenant: str | None, limit: int, as_json: bool
) -> None:
    """List sessions, those that were used last first."""
    for info in watch_thread.call(_listed(app_of(ctx), profile, tenant, limit)):
        click.echo(views.session_info_json(info) if as_json else views.session_row(info))


async def _listed(
    app: Any, profile: str | None, tenant: str | None, limit: int
) -> list[NamedSessionInfo]:
    store = (await watch_thread.watcher(app)).sessions
    return await store.list_sessions(profile=profile, tenant=tenant, limit=limit)


@sessions.command()
@click.argument("session_id")
@json_option
@click.pass_context
def info(ctx: click.Context, session_id: str, as_json: bool) -> None:
    """Show what is known of a session: its owner, calls, times and checkpoint."""
    found = NamedSession(app_of(ctx), session_id).info()
    click.echo(views.session_info_json(found) if as_json else views.session_details(found))


@sessions.command()
@click.argument("session_ids", nargs=-1, required=True)
@click.option(
    "-t", "--timeout", type=float, default=30.0, show_default=True, help="Seconds to wait for each."
)
@json_option
@click.pass_context
def close(ctx: click.Context, session_ids: tuple[str, ...], timeout: float, as_json: bool) -> None:
    """Close sessions, once the calls that they have are done. Namespaces are lost."""
    status = 0
    for session_id in session_ids:
        was_there = NamedSession(app_of(ctx), session_id).close(timeout)
        _report(session_id, "closed" if was_there else "unknown", as_json=as_json)
        status = status if was_there else 1
    ctx.exit(status)


@sessions.command()
@click.argument("session_ids", nargs=-1)
@click.option("--tenant", help="Erase all sessions of this tenant.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
@click.pass_context
def forget(
    ctx: click.Context, session_ids: tuple[str, ...], tenant: str | None, yes: bool, as_json: bool
) -> None:
    """Erase everything of sessions: namespaces, checkpoints, calls, results, histories."""
    if not session_ids and tenant is None:
        raise click.UsageError("name sessions, or a tenant by --tenant")
    which = [*map(cleaned, session_ids), *([f"tenant {cleaned(tenant)}"] if tenant else [])]
    if not yes:
        click.confirm(f"erase everything of {', '.join(which)}?", abort=True, err=True)
    app = app_of(ctx)
    for session_id in session_ids:
        watch_thread.call(forget_session(app, session_id))
        _report(session_id, "forgotten", as_json=as_json)
    if tenant is not None:
        watch_thread.call(forget_tenant(app, tenant))
        _report(f"tenant {tenant}", "forgotten", as_json=as_json)


def _report(name: str, what: str, *, as_json: bool) -> None:
    click.echo(
        views.format_line({"id": name, "state": what}) if as_json else f"{cleaned(name)}: {what}"
    )
