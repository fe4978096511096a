"""A consumer that does not read stops the child, or loses output visibly; memory is bounded."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from capsule_tasks.protocol.messages import Ack, ErrorKind, Gap, Message, Output, Result, Terminal
from capsule_tasks.sessions import Session, SessionState
from capsule_tasks.settings import DiagnosticSettings, OutputSettings
from tests.sessions import HANG_S, Watched, child_config, collect, end_of, eventually, text

KIB = 1024
MIB = 1024 * KIB


def limited(**output: Any) -> Any:
    """A session with a small window, and frequent heartbeats to watch the child by."""
    settings = OutputSettings(**{"window_bytes": 64 * KIB, "chunk_bytes": 4 * KIB} | output)
    return child_config(output=settings, diagnostics=DiagnosticSettings(heartbeat_interval_s=0.02))


async def pause_after_output(stream: Any) -> list[Message]:
    """Read the Ack and the first output, then no more."""
    messages = [await anext(stream), await anext(stream)]
    assert [type(message) for message in messages] == [Ack, Output]
    return messages


async def the_rest(stream: Any) -> list[Message]:
    async with asyncio.timeout(HANG_S):
        return [message async for message in stream]


async def stays_full(session: Session) -> None:
    """Wait until a window of output lies unread, and for three more heartbeats."""
    await eventually(lambda: session.info.queues.buffered_bytes >= 48 * KIB)
    for _ in range(3):
        last = session.info.last_heartbeat_at
        await eventually(lambda last=last: session.info.last_heartbeat_at != last)


async def test_block_drops_nothing_and_memory_stays_bounded_on_both_sides() -> None:
    async with Session(limited()) as session:
        await session.run("import resource")
        await eventually(lambda: session.info.last_heartbeat)
        before = session.info.last_heartbeat.rss_bytes  # type: ignore[union-attr]
        stream = session.execute("for _ in range(20_000): print('x' * 999)")
        messages = await pause_after_output(stream)
        await stays_full(session)
        assert session.info.queues.buffered_bytes < 256 * KIB
        beat = session.info.last_heartbeat
        assert beat is not None
        assert beat.output_backlog_bytes < 1 * MIB
        assert beat.rss_bytes - before < 8 * MIB
        messages += await the_rest(stream)
    assert isinstance(messages[-1], Result)
    assert text(messages) == ("x" * 999 + "\n") * 20_000
    assert messages[-1].stdout_bytes == 20_000_000
    assert not [m for m in messages if isinstance(m, Gap)]


async def test_block_stops_the_code_until_the_consumer_reads_on() -> None:
    async with Session(limited()) as session:
        stream = session.execute("for i in range(5_000): print('x' * 999)\n'through'")
        await pause_after_output(stream)
        await stays_full(session)
        assert session.state is SessionState.BUSY
        assert "<cell 1>" in await session.stack()
        rest = await the_rest(stream)
        assert rest[-1].value == "through"  # type: ignore[attr-defined]


async def test_no_credit_is_lost_however_long_the_flood_is() -> None:
    """Text that costs time to measure, so that grants arrive in the middle of the sums."""
    async with Session(limited(window_bytes=16 * KIB)) as session:
        messages = await collect(
            session,
            "import threading\n"
            "def flood():\n"
            "    for _ in range(100): print('é' * 20_000, end='')\n"
            "threads = [threading.Thread(target=flood) for _ in range(4)]\n"
            "for t in threads: t.start()\n"
            "for t in threads: t.join()",
        )
    assert len(text(messages)) == 400 * 20_000
    assert isinstance(messages[-1], Result)


async def test_drop_oldest_loses_visibly_and_the_counts_add_up() -> None:
    async with Session(limited(backpressure="drop_oldest")) as session:
        stream = session.execute(
            "import sys\n"
            "for i in range(50_000):\n"
            "    print(f'{i:07}é')\n"
            "    print(f'{i:07}', file=sys.stderr)\n"
            "'through'"
        )
        messages = await pause_after_output(stream)
        await eventually(lambda: session.state is not SessionState.BUSY)  # without a reader
        messages += await the_rest(stream)
    assert messages[-1].value == "through"  # type: ignore[attr-defined]
    gaps = [m for m in messages if isinstance(m, Gap)]
    for stream_name, size in (("stdout", 10), ("stderr", 8)):
        received = len(text(messages, stream_name).encode())
        lost = sum(gap.lost_bytes for gap in gaps if gap.stream == stream_name)
        assert lost > 0
        assert received + lost == 50_000 * size
    assert all(gap.lost_messages > 0 for gap in gaps)
    assert text(messages).startswith("0000000é\n")
    assert text(messages).endswith("0049999é\n")
    assert messages[-1].stdout_bytes == len(text(messages).encode())  # type: ignore[attr-defined]


async def test_a_gap_stands_where_the_text_is_missing() -> None:
    async with Session(limited(backpressure="drop_oldest")) as session:
        stream = session.execute("for i in range(50_000): print(f'{i:07}')")
        messages = await pause_after_output(stream)
        await eventually(lambda: session.state is not SessionState.BUSY)
        messages += await the_rest(stream)
    position = 0
    for message in messages:
        if isinstance(message, Gap):
            position += message.lost_bytes
        elif isinstance(message, Output):
            first = message.data.partition("\n")[0]
            if position % 8 == 0:
                assert int(first) == position // 8
            position += len(message.data)
    assert position == 50_000 * 8


async def test_drop_oldest_loses_nothing_that_the_consumer_keeps_up_with() -> None:
    async with Session(limited(backpressure="drop_oldest")) as session:
        messages = await collect(session, "for i in range(1000): print(i)")
    assert text(messages) == "".join(f"{i}\n" for i in range(1000))


async def test_a_writer_without_a_reader_is_slowed_down() -> None:
    """A tight loop of writes would otherwise take a core from the others."""
    loop = """
import sys, time
text, began = "x" * 65535 + "\\n", time.monotonic()
for _ in range(4096):
    sys.stdout.write(text)
time.monotonic() - began
"""
    async with Session(limited(backpressure="drop_oldest")) as session:
        stream = session.execute(loop)
        await pause_after_output(stream)
        await eventually(lambda: session.state is not SessionState.BUSY)
        end = (await the_rest(stream))[-1]
        assert end.value > 0.9  # type: ignore[attr-defined]


async def test_drop_oldest_keeps_the_child_small() -> None:
    async with Session(limited(backpressure="drop_oldest")) as session:
        await session.run("import resource")
        await eventually(lambda: session.info.last_heartbeat)
        before = session.info.last_heartbeat.rss_bytes  # type: ignore[union-attr]
        stream = session.execute("for _ in range(100_000): print('x' * 999)\n'through'")
        await pause_after_output(stream)
        await eventually(lambda: session.state is not SessionState.BUSY)
        assert session.info.queues.buffered_bytes < 1 * MIB
        last = session.info.last_heartbeat_at
        await eventually(lambda: session.info.last_heartbeat_at != last)
        assert session.info.last_heartbeat.rss_bytes - before < 8 * MIB  # type: ignore[union-attr]
        rest = await the_rest(stream)
        assert rest[-1].value == "through"  # type: ignore[attr-defined]


@pytest.mark.parametrize("mode", ["block", "drop_oldest"])
async def test_the_end_is_never_lost_however_full_the_queue_is(mode: str) -> None:
    """A window that is full to the byte when the code ends."""
    async with Session(limited(backpressure=mode)) as session:
        for size in range(63 * KIB, 66 * KIB, 256):
            stream = session.execute(f"print('x' * {size}, end='')")
            await anext(stream)
            rest = await the_rest(stream)
            assert [m for m in rest if isinstance(m, Terminal)] == rest[-1:]
            lost = sum(m.lost_bytes for m in rest if isinstance(m, Gap))
            assert len(text(rest)) + lost == size


@pytest.mark.parametrize("mode", ["block", "drop_oldest"])
@pytest.mark.parametrize("paused", [True, False], ids=["paused consumer", "reading consumer"])
async def test_a_flood_can_be_cancelled(mode: str, paused: bool) -> None:
    """No drain deadline, no kill: the flood is stopped and its namespace is kept."""
    async with Session(limited(backpressure=mode)) as session:
        stream = session.execute(
            "kept = 1\ntry:\n    while True: print('x' * 999)\nfinally: print('cleaned up')",
            execution_id="flood",
        )
        messages = await pause_after_output(stream)
        if paused:
            await stays_full(session)
            cancelling = asyncio.ensure_future(session.cancel("flood", grace_s=HANG_S))
            await asyncio.sleep(0)
            messages += await the_rest(stream)
        else:
            reading = asyncio.ensure_future(the_rest(stream))
            cancelling = asyncio.ensure_future(session.cancel("flood", grace_s=HANG_S))
            messages += await reading
        assert await cancelling == "interrupted"
        assert messages[-1].kind == ErrorKind.CANCELLED  # type: ignore[attr-defined]
        assert text(messages).endswith("cleaned up\n")
        assert (await session.run("kept")).value == 1


async def test_the_end_of_a_cancelled_flood_does_not_wait_for_its_consumer() -> None:
    async with Session(limited()) as session:
        stream = session.execute("while True: print('x' * 999)", execution_id="flood")
        await pause_after_output(stream)
        await stays_full(session)
        async with asyncio.timeout(HANG_S):
            assert await session.cancel("flood", grace_s=HANG_S) == "interrupted"
            await eventually(lambda: session.state is SessionState.READY)
        rest = await the_rest(stream)
        assert rest[-1].kind == ErrorKind.CANCELLED  # type: ignore[attr-defined]


async def test_text_cut_off_by_a_cancel_is_counted_in_a_gap_behind_the_kept_text() -> None:
    async with Session(limited()) as session:
        stream = session.execute("print('a' * 1_000_000, end='')", execution_id="cut")
        messages = await pause_after_output(stream)
        await stays_full(session)
        assert await session.cancel("cut", grace_s=HANG_S) == "interrupted"
        messages += await the_rest(stream)
    assert [type(m) for m in messages[-2:]] == [Gap, type(messages[-1])]
    assert isinstance(messages[-1], Terminal)
    assert len(text(messages)) + messages[-2].lost_bytes == 1_000_000  # type: ignore[attr-defined]


async def test_a_consumer_that_leaves_stops_its_flood_and_frees_the_session() -> None:
    async with Session(limited()) as session:
        stream = session.execute("kept = 1\nwhile True: print('x' * 999)")
        await pause_after_output(stream)
        await stream.aclose()
        await eventually(lambda: session.state is SessionState.READY)
        assert (await session.run("kept")).value == 1
        assert session.info.queues.buffered_bytes == 0


async def test_a_paused_consumer_does_not_delay_questions_and_heartbeats() -> None:
    async with Session(limited()) as session:
        stream = session.execute("while True: print('x' * 999)", execution_id="flood")
        await pause_after_output(stream)
        await stays_full(session)
        assert (await session.namespace_summary(timeout_s=HANG_S)).total == 0
        assert "<cell 1>" in await session.stack("flood")
        await stream.aclose()


async def test_a_paused_coroutine_that_loses_output_does_not_stop_its_neighbours() -> None:
    async with Session(limited(backpressure="drop_oldest")) as session:
        await end_of(session, "import asyncio")
        flood = session.execute(
            "for _ in range(1000):\n    print('x' * 999)\n    await asyncio.sleep(0)\n'through'"
        )
        messages = await pause_after_output(flood)
        await stays_full(session)
        for i in range(5):
            async with asyncio.timeout(HANG_S):
                done = await session.run(f"await asyncio.sleep(0)\nprint('neighbour')\n{i}")
            assert (done.value, done.stdout) == (i, "neighbour\n")
        assert session.info.queues.buffered_bytes < 256 * KIB
        messages += await the_rest(flood)
    lost = sum(message.lost_bytes for message in messages if isinstance(message, Gap))
    assert len(text(messages)) + lost == 1000 * 1000
    assert messages[-1].value == "through"  # type: ignore[attr-defined]


async def test_progress_that_is_not_read_is_bounded_too() -> None:
    async with Session(limited()) as session:
        stream = session.execute(
            "from capsule_tasks import progress\n"
            "print('begun', flush=True)\n"
            "for i in range(20_000): progress(i, 20_000)\n"
            "'through'"
        )
        await pause_after_output(stream)
        await stays_full(session)
        assert session.info.queues.buffered_messages < 1000
        rest = await the_rest(stream)
    assert [m.done for m in rest[:-1]] == list(range(20_000))  # type: ignore[attr-defined]


@pytest.mark.parametrize("mode", ["block", "drop_oldest"])
async def test_a_thread_that_floods_on_does_not_put_off_the_end(mode: str) -> None:
    """The thread is not stuck for ever: its output after the end is late, and it goes on."""
    async with Session(limited(backpressure=mode)) as session:
        await session.run("import threading, time\nstop = False")
        first = await end_of(
            session,
            "def flood():\n"
            "    while not stop: print('x' * 999)\n"
            "threads = [threading.Thread(target=flood) for _ in range(3)]\n"
            "for t in threads: t.start()\n"
            "'ended'",
        )
        assert first.value == "ended"
        second = await session.run("stop = True\nfor t in threads: t.join()\nprint('mine')")
        assert second.stdout == "mine\n"


async def test_many_sessions_flood_at_once_and_each_gets_all_of_its_own() -> None:
    sessions = [Session(limited()) for _ in range(4)]
    await asyncio.gather(*(session.start() for session in sessions))
    watched = [
        Watched(session, f"for _ in range(2000): print('{i}' * 999)")
        for i, session in enumerate(sessions)
    ]
    for i, execution in enumerate(watched):
        assert isinstance(await execution.ended(), Result)
        assert text(execution.messages) == (str(i) * 999 + "\n") * 2000
    await asyncio.gather(*(session.shutdown() for session in sessions))
