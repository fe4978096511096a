"""An app whose agent of openai-agents asks a model over HTTP."""

from __future__ import annotations

import os
import signal

import redis
from agents import Agent, OpenAIProvider, RunConfig, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

from capsule_tasks import Capsule
from tests.acceptance.app import REDIS_URL, app

set_tracing_disabled(True)
_redis = redis.Redis.from_url(REDIS_URL)


@function_tool
async def look(what: str) -> str:
    if what == "death" and not _redis.getset("support:died", 1):
        os.kill(os.getpid(), signal.SIGKILL)
    return f"saw {what}"


@function_tool(needs_approval=True)
async def refund(euros: int) -> str:
    return f"refunded {euros} euros"


client = AsyncOpenAI(
    base_url=os.environ["TEST_MODEL_URL"], api_key=os.environ["TEST_MODEL_KEY"], max_retries=0
)
Capsule(app).runs.register(
    "support",
    Agent(name="support", model="stand-in-1", instructions="Help.", tools=[look, refund]),
    run_config=RunConfig(model_provider=OpenAIProvider(openai_client=client)),
    on_uncertain="retry",
)
