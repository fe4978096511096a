"""A hundred runs as one Celery group. Some of them wait for a person, and the group with them.

celery -A support worker    # in one terminal
python batch.py             # in another one
"""

import json
import time

from celery import group
from support import capsule

RUNS = 100
LIMIT_EUROS = 90


def decide() -> int:
    """Decide about the calls that wait now, as a person does in the morning; their number."""
    calls = capsule.runs.pending(tool="refund", limit=RUNS)
    for call in calls:
        run = capsule.runs.get(call.run_id)
        if json.loads(call.arguments)["euros"] <= LIMIT_EUROS:
            run.approve(call.call_id)
        else:
            run.reject(call.call_id, message="over the limit")
    return len(calls)


def main() -> None:
    runs = group(
        capsule.runs.s("support", f"Refund order {order}.", session=f"customer-{order}")
        for order in range(1, RUNS + 1)
    )
    result = runs.apply_async()
    decisions = 0
    while not result.ready():  # for days, if need be
        decisions += decide()
        time.sleep(0.2)
    answers = result.get()
    refunded = sum("refunded" in answer for answer in answers)
    print(f"{len(answers)} runs ended: {refunded} refunds, {decisions} decisions")


if __name__ == "__main__":
    main()
