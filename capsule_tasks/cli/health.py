"""`celery capsule health`, and where a task is; our remote commands made known to Celery."""

from __future__ import annotations

from typing import Any

import click

from capsule_tasks.cli import views
from capsule_tasks.cli.broker import connected
from capsule_tasks.cli.options import NOBODY, app_of, json_option
from capsule_tasks.taskpool import remote_commands  # noqa: F401 - so that `celery inspect` knows them

_UNHEALTHY = 1

destination_option = click.option(
    "-d", "--destination", multiple=True, metavar="NODE", help="Only these workers."
)
timeout_option = click.option(
    "-t", "--timeout", type=float, default=2.0, show_default=True, help="Seconds to wait."
)


@click.command()
@destination_option
@timeout_option
@json_option
@click.pass_context
def health(ctx: click.Context, destination: tuple[str, ...], timeout: float, as_json: bool) -> None:
    """Whether each worker can run tasks; status 1 if one cannot.

    Status 69 if no worker replies, or the broker cannot be reached.
    """
    replies = ask(ctx, destination, timeout, "capsule_health")
    for name, said in sorted(replies.items()):
        if as_json:
            click.echo(views.format_line({"worker": name, **said}))
            continue
        reasons = said.get("reasons") or [said["error"]] if not said.get("healthy") else []
        children = len(said.get("sessions", ()))
        click.echo(f"{name}: {'; '.join(reasons) or f'healthy, {children} sessions'}")
    if not all(said.get("healthy") for said in replies.values()):
        ctx.exit(_UNHEALTHY)


def stack_by_inspect(
    ctx: click.Context,
    task_id: str,
    destination: tuple[str, ...],
    timeout: float,
    *,
    all_frames: bool,
) -> tuple[dict[str, str], list[str]]:
    """The stacks of the workers that run it, and why the others have none."""
    wanted: dict[str, Any] = {"task_id": task_id}
    if all_frames:  # workers of a release before this one refuse the word
        wanted["all_frames"] = True
    replies = ask(ctx, destination, timeout, "capsule_stack", **wanted)
    found = {name: said["ok"] for name, said in replies.items() if "ok" in said}
    return found, sorted({said["error"] for said in replies.values() if "error" in said})


def ask(
    ctx: click.Context, destination: tuple[str, ...], timeout: float, command: str, **arguments: Any
) -> dict[str, Any]:
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
        click.echo("no worker replied", err=True)
        ctx.exit(NOBODY)
    return replies
