"""A front desk that talks with the customer in text, word by word, in this process.

python front_desk.py    # type lines; an empty one ends the conversation

It needs no worker. The conversation is kept: start it again, and it goes on. Another agent takes
over for invoices, and a person approves refunds of more than 50 euros.
"""

import asyncio
import json
import os
import sys
from contextlib import suppress
from threading import Thread

from offline_models import serves
from offline_realtime import realtime_model
from shop import REDIS_URL

from capsule_tasks import Agent, History, ToolContext, function_tool
from capsule_tasks.realtime import RealtimeConfig, RealtimeRunner, RealtimeSession, RealtimeSettings
from capsule_tasks.runs.records import Item

LARGE_EUROS = 50


@function_tool
async def look_up(order: int) -> str:
    """Look up what was paid for an order."""
    return f"{order} euros were paid"  # here the shop's database is asked


def is_large(call: ToolContext) -> bool:
    return bool(json.loads(call.arguments)["euros"] > LARGE_EUROS)


@function_tool(needs_approval=is_large)
async def refund(order: int, euros: int) -> str:
    """Pay an order back."""
    return f"{euros} euros refunded"  # here the money goes


billing = Agent(
    name="Billing",
    instructions="Answer questions about invoices, in one sentence.",
    tools=[look_up],
)
desk = Agent(
    name="Desk",
    instructions="Look orders up, and refund what was paid. Hand invoices over to Billing.",
    tools=[look_up, refund],
    handoffs=[billing],
)
IN_TEXT = RealtimeConfig(settings=RealtimeSettings(modalities=("text",)))


async def main() -> None:
    """Send what is typed, and show the answer, until there is nothing more."""
    async with (
        History("customer-3", REDIS_URL) as history,
        realtime_model(serves) as model_config,
        RealtimeRunner(desk, config=IN_TEXT).run(
            model_config=model_config, history=history
        ) as session,
    ):
        while line := await typed("> "):
            await session.send_message(line)
            await show_answer(session)


async def show_answer(session: RealtimeSession) -> None:
    """Print the answer as it comes, and ask the person at this terminal about refunds."""
    newest: Item = {}
    async for event in session:
        match event.type:
            case "handoff":
                print(f"{event.to_agent.name} takes over.")
            case "text_delta":
                print(event.delta, end="", flush=True)
            case "tool_end":
                print(f"{event.tool.name}: {event.output}")
            case "tool_approval_required":
                answer = await typed(f"{event.tool} {event.arguments}. Approve it? [y/n] ")
                if answer.startswith("y"):
                    await session.approve_tool_call(event.call_id)
                else:
                    await session.reject_tool_call(
                        event.call_id, message="A person has refused this refund."
                    )
            case "history_added":
                newest = event.item
            case "error":
                print(event.error)
            case "agent_end" if newest["type"] == "message" or event.status != "completed":
                print()
                return  # after a call, the model goes on once it has the output


async def typed(prompt: str) -> str:
    """A line of the person at this terminal; empty at the end."""
    loop, lines = asyncio.get_running_loop(), asyncio.Queue[str]()

    def read() -> None:
        try:
            line = input(prompt).strip()
        except EOFError:
            line = ""
        with suppress(RuntimeError):  # the event loop has ended meanwhile
            loop.call_soon_threadsafe(lines.put_nowait, line)

    # Ctrl-C would wait for the end of a thread of asyncio's own, and so for one more line.
    Thread(target=read, daemon=True).start()
    return await lines.get()


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        sys.stdout.flush()
        os._exit(130)  # the thread that waits for a line would not let the interpreter end
