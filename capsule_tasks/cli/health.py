"""`celery capsule health`, and where a task is; our remote commands made known to Celery."""

from __future__ import annotations

from typing import Any

import click

from capsule_tasks.taskpool import commands  # noqa: F401 - so that `celery inspect` knows them
from capsule_tasks.taskpool.holding import spare_others

_UNHEALTHY = 1
_NOBODY = 69
"""Celery's own status when no worker replies (EX_UNAVAILABLE)."""

destination_option = click.option(
    "-d", "--destination", multiple=True, metavar="NODE", help="Only these workers."
)
timeout_option = click.option(
    "-t", "--timeout", type=float, default=2.0, show_default=True, help="Seconds to wait."
)


@click.command()
@destination_option
@timeout_option
@click.pass_context
def health(ctx: click.Context, destination: tuple[str, ...], timeout: float) -> None:
    """Whether each worker can run tasks; status 1 if one cannot, 69 if nobody replies."""
    replies = ask(ctx, destination, timeout, "capsule_health")
    for name, said in sorted(replies.items()):
        reasons = said.get("reasons") or [said["error"]] if not said.get("healthy") else []
        children = len(said.get("sessions", ()))
        click.echo(f"{name}: {'; '.join(reasons) or f'healthy, {children} sessions'}")
    if not all(said.get("healthy") for said in replies.values()):
        ctx.exit(_UNHEALTHY)


def stack_by_inspect(
    ctx: click.Context, task_id: str, destination: tuple[str, ...], timeout: float
) -> dict[str, str]:
    """What each worker that runs it says; leaves with status 1 if none does."""
    replies = ask(ctx, destination, timeout, "capsule_stack", task_id=task_id)
    found = {name: said["ok"] for name, said in replies.items() if "ok" in said}
    if not found:
        click.echo("\n".join(sorted({said["error"] for said in replies.values()})))
        ctx.exit(_UNHEALTHY)
    return found


def ask(
    ctx: click.Context, destination: tuple[str, ...], timeout: float, command: str, **arguments: Any
) -> dict[str, Any]:
    app = ctx.obj.app
    with app.connection_for_write() as connection:
        spare_others(connection)
        inspect = app.control.inspect(
            destination=list(destination) or None, timeout=timeout, connection=connection
        )
        replies: dict[str, Any] = inspect._request(command, **arguments) or {}  # noqa: SLF001 - as Celery's own commands do
    if not replies:
        click.echo("no worker replied", err=True)
        ctx.exit(_NOBODY)
    return replies
