"""A reply on control that is too large for a frame fails its request, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from capsule_tasks.errors import FrameTooLarge
from capsule_tasks.sessions import Session
from capsule_tasks.settings import KIB, DiagnosticSettings, OutputSettings
from tests.sessions import HANG_S, Watched, child_config, eventually


@contextlib.asynccontextmanager
async def narrow_session() -> AsyncIterator[Session]:
    """One whose frames are as small as they may be, and which must survive."""
    config = child_config(
        max_frame_bytes=64 * KIB,
        output=OutputSettings(chunk_bytes=8 * KIB),
        diagnostics=DiagnosticSettings(heartbeat_interval_s=0.02),
    )
    async with asyncio.timeout(HANG_S), Session(config) as session:
        pid = session.info.pid
        yield session
        assert (await session.run("'alive'")).value == "alive"
        assert session.info.pid == pid


async def test_a_summary_of_long_names() -> None:
    async with narrow_session() as narrow:
        await narrow.run("for n in range(300): globals()[f'{n:0300}'] = n")
        with pytest.raises(FrameTooLarge, match=f"over the ceiling of {64 * KIB} bytes"):
            await narrow.namespace_summary()
        await narrow.run("for n in range(300): del globals()[f'{n:0300}']\ndel n")
        assert (await narrow.namespace_summary()).total == 0


async def test_heartbeats_stacks_and_interrupts_of_many_executions_with_long_ids() -> None:
    async with narrow_session() as narrow:
        source = "import asyncio\nprint('there')\nawait asyncio.Event().wait()"
        executions = [Watched(narrow, source, execution_id=f"{n:0300}") for n in range(300)]
        for execution in executions:
            await execution.until_output("there")
        begun = narrow.info.last_heartbeat_at
        await eventually(lambda: narrow.info.last_heartbeat_at != begun and not running(narrow))
        assert "Thread" in await narrow.stack()  # from faulthandler, which writes to a pipe
        assert await narrow.interrupt() == "interrupted"
        for execution in executions:
            assert (await execution.ended()).type == "KeyboardInterrupt"


def running(session: Session) -> tuple[str, ...]:
    assert session.info.last_heartbeat is not None
    return session.info.last_heartbeat.running
