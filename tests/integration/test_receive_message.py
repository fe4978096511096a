"""`receive_message`: messages of a session that belong to no execution."""

from __future__ import annotations

import asyncio

import pytest

from capsule_tasks.errors import SessionLost
from capsule_tasks.sessions import Session
from tests.sessions import HANG_S, Watched

STUBBORN = """
import time
print("at work")
while True:
    try:
        time.sleep(3600)
    except BaseException:
        pass
"""


async def test_a_wait_ends_when_its_child_is_killed_for_another_reason(session: Session) -> None:
    waiting = asyncio.create_task(session.receive_message())
    watched = Watched(session, STUBBORN)
    await watched.until_output("at work\n")
    assert await session.cancel(watched.execution_id, grace_s=0.05) == "killed"
    async with asyncio.timeout(HANG_S):
        with pytest.raises(SessionLost, match="did not stop"):
            await waiting


async def test_output_of_a_thread_that_outlived_its_execution_arrives(session: Session) -> None:
    await session.run("import threading; threading.Timer(0.01, print, ['late']).start()")
    text = ""
    async with asyncio.timeout(HANG_S):
        while text != "late\n":
            text += (await session.receive_message()).data
