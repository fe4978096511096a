"""An app with agents of our own engine, whose tools are Celery tasks and code in named sessions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import redis
from celery import Celery

import capsule_tasks
from capsule_tasks import Agent, Capsule, code_tool, task_tool
from capsule_tasks.runs.models.model import ModelRequest
from capsule_tasks.testing.models import ScriptedModel, StatelessModel, calls
from tests.acceptance.others.code_app import REDIS_URL, app

_marks = redis.Redis.from_url(REDIS_URL, decode_responses=True)


def declare_tasks(app: Celery) -> SimpleNamespace:
    """The tasks of the tools, on the app of a worker or of a test."""

    @app.task(name="tools.multiply", shared=False)
    def multiply(a: int, b: int = 2) -> int:
        """Multiply two numbers.

        Args:
            a: The first of them.
        """
        print(f"{a} times {b}")  # noqa: T201  its output is passed on
        capsule_tasks.progress(1, 2, "half")
        return a * b

    @app.task(name="tools.hold", shared=False)
    def hold(key: str) -> str:
        """Tell the test, and wait for it."""
        _marks.rpush(f"effects:{key}", "held")
        _marks.rpush(f"mark:{key}", "")
        _marks.blpop([f"go:{key}"])
        return f"held {key}"

    @app.task(name="tools.report", shared=False)
    def report(key: str) -> str:
        """Write and report something, and wait for the test then."""
        print("half of it")  # noqa: T201  its output is passed on
        capsule_tasks.progress(1, 2, "half")
        return hold.run(key)

    @app.task(name="tools.ask", shared=False)
    def ask(question: str) -> str:
        """Ask a person."""
        return f"It is {input(question)}"

    @app.task(name="tools.explode", shared=False)
    def explode(why: str) -> None:
        raise ValueError(why)

    @app.task(name="tools.forget", shared=False, ignore_result=True)
    def forget(key: str) -> str:
        return f"forgot {key}"

    return SimpleNamespace(
        multiply=multiply, hold=hold, report=report, ask=ask, explode=explode, forget=forget
    )


tasks: Any = declare_tasks(app)
capsule = Capsule(app)


class Holding(ScriptedModel):
    """Holds under the key that the user gives, and is done then."""

    def choose(self, request: ModelRequest) -> tuple[int, Any]:
        if any(item.get("type") == "function_call_output" for item in request.input):
            return 2, "done"
        return 1, calls("hold", {"key": request.input[0]["content"]}, "c1")


capsule.runs.register(
    "calculator",
    Agent(
        name="calculator",
        model=StatelessModel(
            [
                calls("multiply", {"a": 6, "b": 7}, "c1"),
                [
                    calls("run_python", {"code": "n = 40\nprint('n is', n)"}, "c2"),
                    calls("explode", {"why": "a dud"}, "c3"),
                ],
                calls("run_python", {"code": "n + 2"}, "c4"),
                "done",
            ]
        ),
        tools=[task_tool(tasks.multiply), task_tool(tasks.explode), code_tool()],
    ),
)
capsule.runs.register(
    "holder",
    Agent(name="holder", model=Holding(), tools=[task_tool(tasks.hold)]),
)
