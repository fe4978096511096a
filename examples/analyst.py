"""An agent that computes in a named session, whose names last from one run to the next.

celery -A shop worker
python analyst.py "Compute this: total = sum(range(101)); total"
python analyst.py "Compute this: total * 2"
"""

import sys

from offline_models import computes, model
from shop import capsule

from capsule_tasks import Agent, code_tool

capsule.runs.register(
    "analyst",
    Agent(
        name="Analyst",
        instructions="Answer by running Python. Names stay from one call to the next.",
        tools=[code_tool()],
        model=model(computes),
    ),
)


def main(question: str) -> None:
    run = capsule.runs.start("analyst", question, session="notebook-1")
    print(run.result(timeout_s=60))


if __name__ == "__main__":
    main(sys.argv[1])
