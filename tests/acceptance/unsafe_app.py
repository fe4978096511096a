"""An app whose modules use libraries before a worker has children: one may be forked, one may not.

numpy ends the threads of its BLAS before a fork and starts them again. asgiref, of Django, keeps
one executor for all calls, whose only thread is missing in a copy: a call there blocks for ever.
"""

from __future__ import annotations

import asyncio
import os

import numpy as np
from asgiref.sync import sync_to_async

from tests.acceptance.app import app

SIZE = 400


@app.task(name="multiply")
def multiply() -> float:
    """Large enough for BLAS to use its threads."""
    return float((np.ones((SIZE, SIZE)) @ np.ones((SIZE, SIZE))).sum())


@app.task(name="call_through_asgiref")
def call_through_asgiref() -> int:
    return asyncio.run(sync_to_async(os.getpid)())


multiply()
call_through_asgiref()

__all__ = ["app"]
