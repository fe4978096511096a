"""A support agent. A person has to approve refunds of more than 50 euros.

celery -A support worker                # in one terminal
python support.py "Refund order 72."    # in another one
"""

import os
import sys
from typing import Any

from agents import Agent, function_tool
from celery import Celery
from offline_model import model

from capsule_tasks import Capsule

REDIS_URL = os.environ.get("REDIS_URL", "redis://localhost:6379/0")
LARGE_EUROS = 50

app = Celery("support", broker=REDIS_URL, backend=REDIS_URL)
capsule = Capsule(app)


@function_tool
async def look_up(order: int) -> str:
    """What was paid for an order."""
    return f"{order} euros were paid"  # here the shop's database is asked


async def is_large(_context: Any, arguments: dict[str, Any], _call_id: str) -> bool:
    return bool(arguments["euros"] > LARGE_EUROS)


@function_tool(needs_approval=is_large)
async def refund(order: int, euros: int) -> str:
    """Pay an order back."""
    return f"{euros} euros refunded"  # here the money goes


capsule.runs.register(
    "support",
    Agent(
        name="Support",
        instructions="Look an order up, and refund what was paid.",
        tools=[look_up, refund],
        model=model(),
    ),
)


def main(question: str) -> None:
    """Start a run, and follow it; ask the person at this terminal about refunds."""
    run = capsule.runs.start("support", question, session="customer-1")
    for event in run.events():
        if getattr(event.message, "kind", "") != "run_parked":
            continue
        for call in run.state().waiting:
            answer = input(f"{call.agent} calls {call.tool} {call.arguments}. Approve it? [y/n] ")
            if answer.startswith("y"):
                run.approve(call.call_id)
            else:
                run.reject(call.call_id, message="A person has refused this refund.")
    print(run.result())
    usage = run.state().usage
    print(f"{usage.requests} requests, {usage.output_tokens} tokens, {usage.time_ms} ms")


if __name__ == "__main__":
    main(sys.argv[1])
