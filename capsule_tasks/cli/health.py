"""`celery capsule health`, and stacks of tasks by remote control."""

from __future__ import annotations

from typing import Any

import click

from capsule_tasks.cli import views
from capsule_tasks.cli.broker import connected
from capsule_tasks.cli.options import EX_UNAVAILABLE, app_of, json_option
from capsule_tasks.taskpool import remote_commands  # noqa: F401 - registers them for `celery inspect`

_UNHEALTHY = 1

destination_option = click.option(
    "-d", "--destination", multiple=True, metavar="NODE", help="Ask only these workers."
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
    """Show whether each worker can run tasks.

    The exit status is 1 if a worker cannot, 69 if no worker replies or the broker is unavailable.
    """
    replies = ask(ctx, destination, timeout, "capsule_health")
    for name, reply in sorted(replies.items()):
        if as_json:
            click.echo(views.format_line({"worker": name, **reply}))
            continue
        reasons = reply.get("reasons") or [reply["error"]] if not reply.get("healthy") else []
        children = len(reply.get("sessions", ()))
        click.echo(f"{name}: {'; '.join(reasons) or f'healthy, {children} sessions'}")
    if not all(reply.get("healthy") for reply in replies.values()):
        ctx.exit(_UNHEALTHY)


def stack_by_inspect(
    ctx: click.Context,
    task_id: str,
    destination: tuple[str, ...],
    timeout: float,
    *,
    all_frames: bool,
) -> tuple[dict[str, str], list[str]]:
    """The stack by worker that runs the task, and the reasons of workers that do not."""
    wanted = {"task_id": task_id, "all_frames": all_frames}
    replies = ask(ctx, destination, timeout, "capsule_stack", **wanted)
    found = {name: reply["ok"] for name, reply in replies.items() if "ok" in reply}
    return found, sorted({reply["error"] for reply in replies.values() if "error" in reply})


def ask(
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
        click.echo("no worker replied", err=True)
        ctx.exit(EX_UNAVAILABLE)
    return replies
