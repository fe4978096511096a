"""An app that reports which of Celery's signals were sent, and in which process."""

from __future__ import annotations

import os
from typing import Any

from celery import signals

from tests.acceptance.app import app, mark


@signals.task_revoked.connect
def tell_revoked(request: Any, terminated: bool, signum: Any, expired: bool, **_: Any) -> None:
    mark(f"revoked:{request.id}", f"{os.getpid()} {bool(terminated)} {bool(expired)}")


@signals.task_retry.connect
def tell_retry(request: Any, reason: Any, **_: Any) -> None:
    mark(f"retry:{request.id}", f"{os.getpid()} {reason}")


@signals.task_unknown.connect
def tell_unknown(name: str, id: str, **_: Any) -> None:  # noqa: A002 - Celery's name
    mark(f"unknown:{id}", f"{os.getpid()} {name}")


__all__ = ["app"]
