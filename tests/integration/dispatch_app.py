"""Tasks for children that are given work by a dispatcher, without a worker."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time

from celery import Celery

app = Celery("dispatch", broker="memory://")
app.conf.task_ignore_result = True


@app.task
def pid() -> int:
    return os.getpid()


@app.task
def ask() -> str:
    return input("your name? ")


@app.task
def crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


@app.task
def hold() -> None:
    sys.stdout.write("holding\n")
    while True:
        time.sleep(0.01)


@app.task
async def hold_async() -> None:
    sys.stdout.write("holding\n")
    await asyncio.Event().wait()
