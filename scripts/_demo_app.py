"""The tasks of `scripts/demo`, on the stock app."""

from __future__ import annotations

import os
import time
import uuid

import capsule_tasks
from workers.app import app

__all__ = ["app", "order", "publish", "report", "spin"]

# The demo kills a worker and waits until another one has its task. With the defaults the lease
# would lapse after half a minute, and the broker would deliver the message again after an hour.
app.conf.capsule_lease_s = 2.0
app.conf.broker_transport_options = {"visibility_timeout": 4}


@app.task
def report(months: list[str]) -> str:
    for number, month in enumerate(months, start=1):
        time.sleep(0.2)  # the work
        print(f"{month} is done")
        capsule_tasks.progress(number, len(months))
    return f"{len(months)} months"


@app.task
def spin() -> None:
    print("spinning")
    try:
        while True:
            pass
    finally:
        print("cleaned up")


@app.task
def publish() -> str:
    return "published" if input("publish the report? ") == "yes" else "kept back"


@app.task
def order(amount: int) -> str:
    receipt = capsule_tasks.step("charge", charge, amount)
    print(f"process {os.getpid()}: receipt {receipt}")
    address = input("ship to? ")
    return f"receipt {receipt}, shipped to {address}"


def charge(amount: int) -> str:
    """A step: made once for each order, also when the order's message is delivered twice."""
    return f"{uuid.uuid4().hex[:6]} for {amount} euros"
