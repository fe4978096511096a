"""Options that several commands share, and the error that is shown when a server is unavailable."""

from __future__ import annotations

import re
import shlex
from typing import Any

import click

EX_UNAVAILABLE = 69
"""Celery's own exit status when no worker replies."""

_JSON = "capsule_tasks.json"
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION = re.compile(r"(\d{1,10}(?:\.\d{1,6})?)([smhd]?)")


def _remember(ctx: click.Context, _param: click.Parameter, value: bool) -> bool:
    """Whether `--json` was given to this command, or to the group before it."""
    ctx.meta[_JSON] = value or ctx.meta.get(_JSON, False)
    return bool(ctx.meta[_JSON])


json_option = click.option(
    "--json",
    "as_json",
    is_flag=True,
    callback=_remember,
    help="Write one JSON object per line.",
)


class Duration(click.ParamType):  # type: ignore[type-arg]
    """A number of seconds, minutes, hours or days; without a unit, seconds."""

    name = "duration"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        if isinstance(value, (int, float)):
            return float(value)
        found = _DURATION.fullmatch(value)
        if found is None:
            self.fail(f"{value!r} is not a duration: write 90, 90s, 15m, 1h or 2d", param, ctx)
        return float(found[1]) * _SECONDS[found[2]]


class Unavailable(click.ClickException):
    """The broker, or the Redis of the streams, is unavailable."""

    exit_code = EX_UNAVAILABLE


def app_of(ctx: click.Context) -> Any:
    """The app that was given to Celery's command line."""
    return ctx.obj.app


def command_line(ctx: click.Context, *words: str) -> str:
    """A `celery capsule` command for the same app, quoted for a shell."""
    app = ctx.find_root().params.get("app")
    chosen = ["-A", app] if isinstance(app, str) else []
    return shlex.join(["celery", *chosen, "capsule", *words])
