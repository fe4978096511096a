"""Celery tasks as tools, without a worker."""

from __future__ import annotations

import json
from typing import Any

import pytest
from celery import Celery

from capsule_tasks import Agent, Capsule, RunContext, ToolContext, code_tool, task_tool
from capsule_tasks.errors import InvalidSetting, WrongArguments

app = Celery("unit", broker="memory://", set_as_current=False)
app.conf.task_always_eager = True
Capsule(app)


@app.task(shared=False)
def multiply(a: int, b: int = 2) -> dict[str, int]:
    return {"product": a * b}


@app.task(shared=False, bind=True)
def about(self: Any, text: str) -> str:
    return f"{self.name}: {text}"


@app.task(shared=False)
def explode() -> None:
    raise ValueError("a dud")


@app.task(shared=False)
async def later(text: str) -> str:
    return text


@app.task(shared=False)
def needs_run(context: RunContext) -> str:
    return context.run_id


def call() -> ToolContext:
    return ToolContext(
        run_id="r", agent=Agent(name="a"), tool="bare:t", call_id="c", key="c", arguments=""
    )


async def output(task: Any, **arguments: Any) -> Any:
    return await task_tool(task).invoke(call(), json.dumps(arguments))


async def test_an_eager_app_runs_the_task_in_this_process() -> None:
    assert await output(multiply, a=21) == '{"product":42}'
    assert (await output(about, text="hello")).endswith(".about: hello")
    assert await output(later, text="hello") == "hello"
    with pytest.raises(ValueError, match="a dud"):
        await output(explode)
    with pytest.raises(WrongArguments, match="`a`"):
        await output(multiply, b=2)


def test_a_tool_is_named_after_its_task() -> None:
    tool = task_tool(multiply)
    assert (tool.name, tool.on_uncertain) == ("multiply", "retry")
    assert list(tool.parameters["properties"]) == ["a", "b"]
    named = task_tool(multiply, name="times", description="Multiply.", needs_approval=True)
    assert (named.name, named.description, named.needs_approval) == ("times", "Multiply.", True)


@pytest.mark.parametrize(
    ("task", "options", "error", "why"),
    [
        (len, {}, InvalidSetting, "a Celery task"),
        (needs_run, {}, InvalidSetting, "takes no context"),
        (multiply, {"name": "a name"}, InvalidSetting, "task_tool.name = 'a name'"),
        (multiply, {"task_id": "x"}, InvalidSetting, "task_id = 'x': must be left out"),
        (multiply, {"timeout_s": 0}, InvalidSetting, "timeout_s = 0"),
        (multiply, {"max_output_chars": -1}, InvalidSetting, "max_output_chars = -1"),
        (multiply, {"que": "mail"}, TypeError, "'que'; did you mean queue"),
    ],
)
def test_what_makes_no_tool_is_refused(
    task: Any, options: dict[str, Any], error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        task_tool(task, **options)


def test_code_tools_refuse_what_names_nothing() -> None:
    for options in ({"session": ""}, {"profile": ""}, {"timeout_s": -1}, {"name": "run code"}):
        given: dict[str, Any] = dict(options)
        with pytest.raises(ValueError, match=next(iter(options))):
            code_tool(app, **given)
