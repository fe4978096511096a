"""A support agent of our own engine. A person has to approve refunds of more than 50 euros.

celery -A shop worker                   # in one terminal
python refunds.py "Refund order 72."    # in another one
"""

import json
import sys

from offline_models import model, pays_back
from shop import app, capsule

from capsule_tasks import Agent, ToolContext, function_tool, task_tool

LARGE_EUROS = 50


@function_tool
async def look_up(order: int) -> str:
    """Look up what was paid for an order."""
    return f"{order} euros were paid"  # here the shop's database is asked


@app.task
def refund(order: int, euros: int) -> str:
    """Pay an order back."""
    return f"{euros} euros refunded"  # here the money goes


def is_large(call: ToolContext) -> bool:
    return bool(json.loads(call.arguments)["euros"] > LARGE_EUROS)


capsule.runs.register(
    "refunds",
    Agent(
        name="Refunds",
        instructions="Look an order up, and refund what was paid.",
        tools=[look_up, task_tool(refund, name="refund", needs_approval=is_large)],
        model=model(pays_back),
    ),
)


def main(question: str) -> None:
    """Start a run, and follow it; ask the person at this terminal about refunds."""
    run = capsule.runs.start("refunds", question, session="customer-1")
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


if __name__ == "__main__":
    main(sys.argv[1])
