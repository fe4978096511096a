"""`celery capsule sessions …`, as a person and as a script."""

from __future__ import annotations

import json
from uuid import uuid4

import pytest
from celery import Celery
from celery.bin.base import CLIContext
from click.testing import CliRunner

from capsule_tasks import Capsule
from capsule_tasks.cli import capsule
from capsule_tasks.client import NamedSession

pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated setex")  # which Celery makes


@pytest.fixture
def app(valkey_url: str, prefix: str) -> Celery:
    app = Celery(broker=valkey_url, backend=valkey_url)
    app.conf.update(capsule_redis_url=valkey_url, capsule_prefix=prefix)
    return app


@pytest.fixture
def session(app: Celery) -> NamedSession:
    session = Capsule(app).session(uuid4().hex, tenant="acme")
    session.execute("1")
    return session


def typed(app: Celery, *words: str, status: int = 0, answers: str = "") -> str:
    context = CLIContext(app, no_color=True, workdir=None)
    done = CliRunner().invoke(capsule, ["sessions", *words], obj=context, input=answers)
    assert done.exit_code == status, (done.output, done.exc_info)
    return done.output


def test_sessions_are_listed(app: Celery, session: NamedSession) -> None:
    row = f"{session.id}: profile sandbox, tenant acme, not live on a worker, 0 executions, "
    row += "1 call unfinished\n"
    assert typed(app, "list") == row
    assert typed(app, "list", "--tenant", "acme", "--profile", "sandbox") == row
    assert typed(app, "list", "--tenant", "other") == ""
    (line,) = typed(app, "list", "--json").splitlines()
    assert json.loads(line)["id"] == session.id


def test_a_session_is_described(app: Celery, session: NamedSession) -> None:
    shown = typed(app, "info", session.id)
    assert "tenant      acme\n" in shown
    assert "waits       1 call\n" in shown
    assert "owner       none: no worker has it now\n" in shown
    assert json.loads(typed(app, "--json", "info", session.id))["waiting"] == 1


def test_an_unknown_session_is_an_error_in_one_line(app: Celery) -> None:
    shown = typed(app, "info", "nobody", status=1)
    assert shown.startswith("Error: there is no session 'nobody'")
    assert shown.count("\n") == 1


def test_closing_says_that_calls_are_unfinished(app: Celery, session: NamedSession) -> None:
    shown = typed(app, "close", session.id, "--timeout", "0.1", status=1)
    assert "was not closed within 0.1 s; it takes no calls" in shown
    assert typed(app, "close", "nobody", status=1) == "nobody: unknown\n"


def test_sessions_are_forgotten_after_a_question(app: Celery, session: NamedSession) -> None:
    assert "erase everything of" in typed(app, "forget", session.id, answers="n\n", status=1)
    assert session.info().waiting == 1
    assert typed(app, "forget", session.id, "--yes") == f"{session.id}: forgotten\n"
    assert typed(app, "list") == ""
    forgotten = typed(app, "forget", "--tenant", "acme", "--yes", "--json")
    assert json.loads(forgotten) == {"id": "tenant acme", "state": "forgotten"}
    assert "name sessions, or a tenant" in typed(app, "forget", status=2)
