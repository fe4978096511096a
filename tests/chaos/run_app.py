"""The app of the chaos test of durable runs: an agent that mails, looks and pays.

There are two of it, one of openai-agents and one of our own engine, which do the same.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator
from typing import Any

import redis
from agents import Agent, RunContextWrapper, function_tool, set_tracing_disabled
from celery import Celery, signals

import capsule_tasks.testing.models as ours
from capsule_tasks import Agent as OurAgent
from capsule_tasks import Capsule, ToolContext
from capsule_tasks import function_tool as our_function_tool
from capsule_tasks.runs.agents.tools import Tool
from tests.agents_script import StatelessModel, calls, says

set_tracing_disabled(True)

URL = os.environ.get("REDIS_URL", "redis://localhost")
LEASE_S = 2.0
CALLS = {
    "mail": (1, 2, 3, 4, 6, 7),
    "look": (5, 8),
    "pay": (1, 2),
}
"""The calls that each run makes; those of `look` may be repeated, those of `pay` are approved."""

app = Celery("tests.chaos.run_app", broker=URL, backend=URL)
capsule = Capsule(app)
app.conf.update(
    task_default_queue=os.environ.get("TEST_QUEUE", "celery"),
    broker_connection_retry_on_startup=True,
    broker_transport_options={
        "visibility_timeout": int(os.environ.get("TEST_VISIBILITY", "3600")),
        "unacked_restore_interval": 0.2,
        "client_name": os.environ.get("TEST_CLIENT_NAME"),
    },
    result_backend_always_retry=True,
    capsule_lease_s=LEASE_S,
    capsule_loss_limit=int(os.environ.get("TEST_LOSS_LIMIT", "5")),
)
_effects = redis.Redis.from_url(URL)
_random = random.Random()


async def _a_while() -> None:
    await asyncio.sleep(_random.uniform(0.0, 0.1))


async def _effect(context: RunContextWrapper[Any] | ToolContext, effect: str) -> str:
    """Something that must not happen twice; a person can look it up."""
    _effects.hset("drivers", os.getppid(), os.getpid())  # so that the test knows whom to kill
    await _a_while()
    _effects.rpush(f"effects:{context.context['run']}", effect)
    await _a_while()
    return f"done: {effect}"


@function_tool
async def mail(context: RunContextWrapper[Any], number: int) -> str:
    return await _effect(context, f"mail {number}")


@function_tool
async def look(context: RunContextWrapper[Any], number: int) -> str:
    return await _effect(context, f"look {number}")


@function_tool(needs_approval=True)
async def pay(context: RunContextWrapper[Any], number: int) -> str:
    return await _effect(context, f"pay {number}")


class SlowModel(StatelessModel):
    """Thinks for a moment, and forgets what it was asked."""

    async def stream_response(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        await _a_while()
        async for event in super().stream_response(*args, **kwargs):
            yield event
        self.asked.clear()


def _turn(*names: str) -> list[Any]:
    made = [name.split() for name in names]
    return [calls(tool, f'{{"number": {n}}}', f"c_{tool}_{n}") for tool, n in made]


TURNS = (
    ("mail 1", "mail 2"),
    ("pay 1",),
    ("mail 3", "mail 4", "look 5"),
    ("mail 6",),
    ("pay 2", "mail 7"),
    ("look 8",),
)
SAID = "all is done"

capsule.runs.register(
    "clerk",
    Agent(
        name="clerk",
        model=SlowModel(*(_turn(*names) for names in TURNS), [says(SAID)]),
        tools=[mail, look, pay],
    ),
    on_uncertain={"bare:look": "retry"},
)


def _our_tool(name: str) -> Tool:
    async def work(context: ToolContext, number: int) -> str:
        return await _effect(context, f"{name} {number}")

    return our_function_tool(name=name, needs_approval=name == "pay")(work)


async def _forgets(_: Any) -> None:
    await _a_while()
    our_model.requests.clear()


def _our_turn(*names: str) -> list[Any]:
    made = [name.split() for name in names]
    return [ours.calls(tool, {"number": int(n)}, f"c_{tool}_{n}") for tool, n in made]


our_model = ours.StatelessModel([*(_our_turn(*names) for names in TURNS), SAID], on_call=_forgets)
capsule.runs.register(
    "our clerk",
    OurAgent(name="clerk", model=our_model, tools=[_our_tool(name) for name in CALLS]),
    on_uncertain={"bare:look": "retry"},
)


@signals.worker_ready.connect
def tell_ready(**_: object) -> None:
    if descriptor := os.environ.pop("TEST_READY_FD", None):
        os.write(int(descriptor), b"ready\n")
