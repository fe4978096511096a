"""Which message travels on which channel: a real child, and the page on the wire format."""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from capsule_tasks.errors import FrameTooLarge, IncompatibleProtocol
from capsule_tasks.protocol.messages import InputRequest, Interrupt, Message, Output
from capsule_tasks.sessions import Session, SessionConfig
from capsule_tasks.sessions.process import channel as channel_module
from capsule_tasks.sessions.process.channel import Channel
from capsule_tasks.sessions.process.child_process import ChildDescriptors
from capsule_tasks.sessions.states import SessionState
from capsule_tasks.settings import (
    KIB,
    ChildSettings,
    DiagnosticSettings,
    OutputSettings,
)
from tests.sessions import Watched, collect, eventually

PAGE = (Path(__file__).parents[2] / "docs" / "wire-format.md").read_text()
SECTION = re.compile(r"^### (\w+)\n\n`\w+` · .+ · (control|bulk)$", re.MULTILINE)
DOCUMENTED = {name: {channel} for name, channel in SECTION.findall(PAGE)}

CONFIG = SessionConfig(
    child=ChildSettings(
        diagnostics=DiagnosticSettings(heartbeat_interval_s=0.01),
        output=OutputSettings(backpressure="drop_oldest", window_bytes=1000, chunk_bytes=100),
        max_frame_bytes=64 * KIB,
    )
)


class FromTheFuture(Message, kw_only=True, tag="from_the_future"):
    """A message no child knows."""


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """For each type of message the channels it was seen on, in either direction."""
    seen: dict[str, set[str]] = defaultdict(set)
    for method in [name for name in vars(Channel) if name.startswith(("send_", "post_"))]:
        send, used = getattr(Channel, method), method.partition("_")[2]

        def sending(channel: Channel, message: Any, send: Any = send, used: str = used) -> Any:
            seen[type(message).__name__].add(used)
            return send(channel, message)

        monkeypatch.setattr(Channel, method, sending)
    reader = channel_module._Reader

    class Reader(reader):
        """Each channel makes its reader of control before that of bulk."""

        made = 0

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            name = ("control", "bulk")[Reader.made % 2]
            Reader.made += 1
            decoder: Any = self.decoder
            feed = decoder.feed

            def feeding(data: bytes) -> Any:
                for message in feed(data):
                    seen[type(message).__name__].add(name)
                    yield message

            decoder.feed = feeding

    monkeypatch.setattr(channel_module, "_Reader", Reader)
    return seen


async def converse(session: Session, seen: dict[str, set[str]]) -> None:
    """Have every message sent at least once."""
    await collect(session, "from capsule_tasks import progress\nprogress(1)\n1")
    asking = Watched(session, "input('? ')")
    request = await asking.until(InputRequest)
    waiting = Watched(session, "1", on_busy="wait")
    await session.namespace_summary()
    await session.stack()
    await session.input_response("x", request_id=request.id, execution_id=asking.execution_id)
    await asking.ended()
    await waiting.ended()
    saved = await session.checkpoint()
    await session.restore(saved)
    sleeping = Watched(session, "print('go')\nimport time\ntime.sleep(60)")
    await sleeping.until(Output)
    await session.interrupt()
    await sleeping.ended()
    looping = Watched(session, "print('go')\nwhile True: pass")
    await looping.until(Output)
    await session.cancel(looping.execution_id)
    await looping.ended()
    messages = session.execute("for n in range(1000): print('x' * 100)")
    await anext(messages)
    await eventually(lambda: session.state is not SessionState.BUSY)
    async for _ in messages:
        pass
    await session.run("for n in range(300): globals()[f'{n:0300}'] = n")
    with pytest.raises(FrameTooLarge):
        await session.namespace_summary()
    assert session._child is not None
    session._child.send_control(FromTheFuture())
    await eventually(lambda: {"Unsupported", "Heartbeat"} <= seen.keys())


OF_TASKS = {"RunEvent", "SoftLimit", "TaskResult"}
"""Sent only where Celery tasks run, which `tests/acceptance` does with a real worker."""


async def test_every_message_travels_on_the_channel_the_page_names(
    seen: dict[str, set[str]],
) -> None:
    async with Session(CONFIG) as session:
        await converse(session, seen)
    with pytest.raises(IncompatibleProtocol):
        await Session(SessionConfig(protocol_versions=(99,))).start()
    assert seen.pop("FromTheFuture") == {"control"}
    spoken = {name: ways for name, ways in DOCUMENTED.items() if name not in OF_TASKS}
    assert dict(seen) == spoken


async def test_messages_to_a_dead_child_are_dropped_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sends: list[int | None] = []
    send = channel_module._Writer._send

    def counted(writer: Any, data: Any) -> int | None:
        sends.append(sent := send(writer, data))
        return sent

    monkeypatch.setattr(channel_module._Writer, "_send", counted)
    with contextlib.closing(ChildDescriptors()) as descriptors:
        process: Any = SimpleNamespace(descriptors=descriptors)
        channel = Channel(process, SessionConfig())
        channel.start(print, lambda *_: True, lambda _: None)
        while channel._control_out.buffered < 100_000:
            channel.send_control(Interrupt())
        sends.clear()
        descriptors.close_theirs()
        await eventually(lambda: channel._control_out.buffered == 0)
        assert sends == [None]
        channel.send_control(Interrupt())
        channel.close()
