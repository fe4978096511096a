"""`celery capsule …`, in Celery's own command line; and our remote commands made known to it."""

from __future__ import annotations

from typing import Any

import click

from capsule_tasks.taskpool import commands  # noqa: F401 - so that `celery inspect` knows them

_UNHEALTHY = 1
_NOBODY = 69
"""Celery's own status when no worker replies (EX_UNAVAILABLE)."""


@click.group()
def capsule() -> None:
    """Sessions: their health, and where a task is."""


_destination = click.option(
    "-d", "--destination", multiple=True, metavar="NODE", help="Only these workers."
)
_timeout = click.option(
    "-t", "--timeout", type=float, default=2.0, show_default=True, help="Seconds to wait."
)


@capsule.command()
@_destination
@_timeout
@click.pass_context
def health(ctx: click.Context, destination: tuple[str, ...], timeout: float) -> None:
    """Whether each worker can run tasks; status 1 if one cannot, 69 if nobody replies."""
    replies = _ask(ctx, destination, timeout, "capsule_health")
    for name, said in sorted(replies.items()):
        reasons = said.get("reasons") or [said["error"]] if not said.get("healthy") else []
        children = len(said.get("sessions", ()))
        click.echo(f"{name}: {'; '.join(reasons) or f'healthy, {children} sessions'}")
    if not all(said.get("healthy") for said in replies.values()):
        ctx.exit(_UNHEALTHY)


@capsule.command()
@click.argument("task_id")
@_destination
@_timeout
@click.pass_context
def stack(ctx: click.Context, task_id: str, destination: tuple[str, ...], timeout: float) -> None:
    """Where the code of a running task is; status 1 if no worker runs it."""
    replies = _ask(ctx, destination, timeout, "capsule_stack", task_id=task_id)
    found = {name: said["ok"] for name, said in replies.items() if "ok" in said}
    for name, text in found.items():
        click.echo(f"{name}:\n{text}")
    if not found:
        click.echo("\n".join(sorted({said["error"] for said in replies.values()})))
        ctx.exit(_UNHEALTHY)


def _ask(
    ctx: click.Context, destination: tuple[str, ...], timeout: float, command: str, **arguments: Any
) -> dict[str, Any]:
    control = ctx.obj.app.control
    inspect = control.inspect(destination=list(destination) or None, timeout=timeout)
    replies: dict[str, Any] = inspect._request(command, **arguments) or {}  # noqa: SLF001 - as Celery's own commands do
    if not replies:
        click.echo("no worker replied", err=True)
        ctx.exit(_NOBODY)
    return replies
