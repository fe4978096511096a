"""Three agents: one reads the question, and hands it over to the one that it is for.

The same agent runs in this process, and as a task of a worker:

python triage.py "Where is my invoice?"
celery -A shop worker
python triage.py "Where is my parcel?" --durable
"""

import asyncio
import sys

from offline_models import answers_for, model, sorts
from shop import REDIS_URL, capsule

from capsule_tasks import Agent, History, Runner

billing = Agent(name="Billing", model=model(answers_for("Billing")))
shipping = Agent(name="Shipping", model=model(answers_for("Shipping")))
triage = Agent(
    name="Triage",
    instructions="Hand questions about money over to Billing, and others to Shipping.",
    handoffs=[billing, shipping],
    model=model(sorts),
)
capsule.runs.register("triage", triage)


async def main(question: str) -> None:
    """Run the agent here, and print what it says as it comes."""
    async with History("customer-2", REDIS_URL) as session:
        stream = Runner.run_streamed(triage, question, session=session)
        async for event in stream.events():
            if event.kind == "agent":
                print(f"[{event.agent}] ", end="")
            if event.kind == "text_delta":
                print(event.data["text"], end="")
        print()


if __name__ == "__main__":
    if "--durable" in sys.argv:
        print(capsule.runs.start("triage", sys.argv[1], session="customer-2").result(timeout_s=60))
    else:
        asyncio.run(main(sys.argv[1]))
