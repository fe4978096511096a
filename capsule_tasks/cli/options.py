"""Options that several commands have, and the one line that a broker which is away is worth."""

from __future__ import annotations

import re
import shlex
from typing import Any

import click

NOBODY = 69
"""Celery's own status when no worker replies (EX_UNAVAILABLE)."""

_JSON = "capsule_tasks.json"
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION = re.compile(r"(\d{1,10}(?:\.\d{1,6})?)([smhd]?)")


def _remembered(ctx: click.Context, _param: click.Parameter, value: bool) -> bool:
    """Whether it was given here, or to a command in front of this one."""
    ctx.meta[_JSON] = value or ctx.meta.get(_JSON, False)
    return bool(ctx.meta[_JSON])


json_option = click.option(
    "--json",
    "as_json",
    is_flag=True,
    callback=_remembered,
    help="One JSON object a line.",
)


class Duration(click.ParamType):  # type: ignore[type-arg]
    """Seconds, from a number with or without a unit."""

    name = "duration"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        if isinstance(value, (int, float)):
            return float(value)
        found = _DURATION.fullmatch(value)
        if found is None:
            self.fail(f"{value!r} is no time: write 90, 90s, 15m, 1h or 2d", param, ctx)
        return float(found[1]) * _SECONDS[found[2]]


class Unavailable(click.ClickException):
    """The broker, or the Redis of the streams, cannot be reached."""

    exit_code = NOBODY


def app_of(ctx: click.Context) -> Any:
    """The app that Celery's command line was given."""
    return ctx.obj.app


def command_line(ctx: click.Context, *words: str) -> str:
    """Another command of ours, as it is to be typed for the same app."""
    app = ctx.find_root().params.get("app")
    chosen = ["-A", app] if isinstance(app, str) else []
    return shlex.join(["celery", *chosen, "capsule", *words])
