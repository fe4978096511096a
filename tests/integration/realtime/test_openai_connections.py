"""Connections of OpenAIRealtime: how they begin, and every way in which they end."""

from __future__ import annotations

import asyncio
import gc
import sys
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection

from capsule_tasks.errors import (
    InvalidSetting,
    RealtimeInUse,
    RealtimeLost,
    RealtimeNoAnswer,
    RealtimeRefused,
)
from capsule_tasks.realtime.model import (
    AudioDelta,
    AudioInterrupted,
    ConnectionEnded,
    Interrupt,
    ItemChanged,
    ItemTruncated,
    ModelEvent,
    RealtimeModel,
    ResponseEnded,
    SendAudio,
    ServerEvent,
    UpdateSettings,
)
from capsule_tasks.realtime.openai.websocket import OpenAIRealtime
from capsule_tasks.realtime.settings import RealtimeModelConfig
from capsule_tasks.testing.realtime import Hold, RealtimeServer, speaks
from tests.integration.realtime.listeners import HI, LOOK, Heard, agent, config, opened

# --- connect -------------------------------------------------------------------------------------


def test_it_is_a_realtime_model() -> None:
    assert isinstance(OpenAIRealtime(), RealtimeModel)


@pytest.mark.parametrize("name", ["open_timeout_s", "answer_timeout_s", "max_message_bytes"])
def test_limits_are_checked(name: str) -> None:
    with pytest.raises(InvalidSetting, match=f"OpenAIRealtime.{name} = 0"):
        OpenAIRealtime(**{name: 0})


async def test_a_connect_applies_the_settings(
    model: OpenAIRealtime, server: RealtimeServer, heard: Heard
) -> None:
    await model.connect(config(server), agent(LOOK, voice="ash", tool_choice="look"))
    [update] = server.received
    assert update["type"] == "session.update"
    assert server.connection.settings.wire["instructions"] == "Be kind."
    assert server.connection.settings.wire["audio"]["output"]["voice"] == "ash"
    assert server.connection.headers["authorization"] == "Bearer a key"
    assert heard.events == []


async def _later() -> str:
    return "later"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"api_key": lambda: "made"}, "Bearer made"),
        ({"api_key": _later}, "Bearer later"),
        ({"api_key": None}, "Bearer of the environment"),
    ],
)
async def test_keys(
    model: OpenAIRealtime,
    server: RealtimeServer,
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, Any],
    expected: str,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "of the environment")
    await model.connect(config(server, **fields), agent())
    assert server.connection.headers["authorization"] == expected


async def test_headers_take_the_place_of_the_key(
    model: OpenAIRealtime, server: RealtimeServer
) -> None:
    await model.connect(config(server, api_key=None, headers={"api-key": "azure"}), agent())
    assert server.connection.headers["api-key"] == "azure"
    assert "authorization" not in server.connection.headers


async def test_without_a_key_nothing_is_asked(
    model: OpenAIRealtime, server: RealtimeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(InvalidSetting, match=r"RealtimeModelConfig\.api_key = None"):
        await model.connect(config(server, api_key=None), agent())
    assert server.handshakes == 0


async def test_without_websockets_the_error_says_what_to_install(
    model: OpenAIRealtime, server: RealtimeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "capsule_tasks.realtime.openai.connection", None)
    with pytest.raises(ImportError, match=r"pip install 'capsule-tasks\[realtime\]'"):
        await opened(model, server)


async def test_a_url_that_is_none(model: OpenAIRealtime) -> None:
    with pytest.raises(InvalidSetting, match=r"RealtimeModelConfig\.url = 'http://localhost'"):
        await model.connect(RealtimeModelConfig(url="http://localhost", api_key="k"), agent())


@pytest.mark.parametrize(
    ("status", "error"),
    [(401, RealtimeRefused), (404, RealtimeRefused), (429, RealtimeLost), (503, RealtimeLost)],
)
async def test_a_handshake_that_is_refused(
    model: OpenAIRealtime, server: RealtimeServer, status: int, error: type[Exception]
) -> None:
    server.refuse_handshakes(status)
    with pytest.raises(error, match=f"HTTP {status}: .*refused by the script"):
        await opened(model, server)
    await opened(model, server)


async def test_a_server_that_is_not_there(model: OpenAIRealtime, server: RealtimeServer) -> None:
    url = server.url
    await server.stop()
    with pytest.raises(RealtimeLost, match="ConnectionRefusedError"):
        await model.connect(RealtimeModelConfig(url=url, api_key="k"), agent())


async def test_a_handshake_that_takes_too_long(server: RealtimeServer) -> None:
    released = asyncio.Event()
    server.delay_handshakes(released)
    model = OpenAIRealtime(open_timeout_s=0.05)
    with pytest.raises(RealtimeNoAnswer, match=r"did not answer the connection within 0\.05 s"):
        await opened(model, server)
    released.set()
    await model.close()


async def test_settings_that_are_refused_end_the_connect(
    model: OpenAIRealtime, server: RealtimeServer, heard: Heard
) -> None:
    server.refuse("session.update", "no such voice", "invalid_value")
    with pytest.raises(RealtimeRefused, match="no such voice"):
        await opened(model, server)
    await server.wait_for_open(0)
    assert heard.events == []
    await opened(model, server)


async def test_a_close_that_fails_does_not_hide_why_the_connect_failed(
    model: OpenAIRealtime, server: RealtimeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(self: ClientConnection) -> None:
        raise OSError("no close")

    monkeypatch.setattr(ClientConnection, "close", fail)
    server.refuse("session.update", "no such voice", "invalid_value")
    with pytest.raises(RealtimeRefused, match="no such voice"):
        await opened(model, server)
    await server.wait_for_open(0)


async def test_settings_that_are_not_answered_end_the_connect(server: RealtimeServer) -> None:
    server.ignore("session.update")
    model = OpenAIRealtime(answer_timeout_s=0.05)
    with pytest.raises(RealtimeNoAnswer, match="the settings"):
        await opened(model, server)
    await server.wait_for_open(0)


async def test_settings_that_cannot_be_told_end_the_connect(
    model: OpenAIRealtime, server: RealtimeServer
) -> None:
    with pytest.raises(InvalidSetting, match="tool_choice"):
        await model.connect(config(server), agent(tool_choice="unknown"))
    await server.wait_for_open(0)


async def test_a_connection_that_is_lost_while_the_settings_are_applied(
    model: OpenAIRealtime, server: RealtimeServer, heard: Heard
) -> None:
    server.ignore("session.update")
    connecting = asyncio.create_task(opened(model, server))
    await server.wait_for("session.update")
    server.connection.abort()
    with pytest.raises(RealtimeLost):
        await connecting
    assert heard.all(ConnectionEnded) == [], "the connect has told it"


@pytest.mark.parametrize("phase", ["key", "handshake", "settings"])
@pytest.mark.parametrize("how", ["cancel", "close"])
async def test_a_connect_is_given_up(
    model: OpenAIRealtime, server: RealtimeServer, phase: str, how: str
) -> None:
    asked = asyncio.Event()
    released = asyncio.Event()

    async def key() -> str:
        asked.set()
        if phase == "key":
            await released.wait()
        return "a key"

    if phase == "handshake":
        server.delay_handshakes(released)
    if phase == "settings":
        server.ignore("session.update")
    connecting = asyncio.create_task(model.connect(config(server, api_key=key), agent()))
    await asked.wait()
    if phase == "handshake":
        await server.wait_until(lambda: server.handshakes == 1, "a handshake")
    if phase == "settings":
        await server.wait_for("session.update")
    with pytest.raises(RealtimeInUse):
        await opened(model, server)
    if how == "cancel":
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
    else:
        await model.close()
        with pytest.raises(RealtimeLost, match="was closed while it connected"):
            await connecting
    released.set()
    await server.wait_for_open(0)
    with pytest.raises(RealtimeLost, match="it is not open"):
        await model.send_event(HI)
    await opened(model, server)


@pytest.mark.parametrize("how", ["cancel", "close"])
async def test_a_connect_is_given_up_at_every_step(
    model: OpenAIRealtime, server: RealtimeServer, heard: Heard, how: str
) -> None:
    """After so many turns of the event loop, until one more is too late."""
    turns, ended = 0, None
    while turns < 3 or ended is not None:
        turns += 1
        connecting = asyncio.create_task(opened(model, server))
        for _ in range(turns):
            await asyncio.sleep(0)
        if how == "cancel":
            connecting.cancel()
        await model.close()
        [ended] = await asyncio.gather(connecting, return_exceptions=True)
        assert isinstance(ended, asyncio.CancelledError | RealtimeLost | None)
        await server.wait_for_open(0)
    assert heard.events == []


async def test_one_connection_at_a_time(model: OpenAIRealtime, server: RealtimeServer) -> None:
    await opened(model, server)
    with pytest.raises(RealtimeInUse, match="'gpt-realtime'"):
        await opened(model, server)
    assert server.handshakes == 1
    await model.close()
    await opened(model, server)


async def test_a_new_connection_begins_anew(
    model: OpenAIRealtime, server: RealtimeServer, heard: Heard
) -> None:
    held = Hold()
    server.add(speaks("Hello there", held), speaks("Again"))
    await opened(model, server)
    await model.send_event(HI)
    await heard.wait(AudioDelta)
    await model.send_event(HI)  # waits for the response
    await model.close()
    held.release()
    heard.events.clear()
    await opened(model, server)
    await server.connection.start_speaking()
    await model.send_event(HI)
    await heard.wait(ResponseEnded)
    assert heard.all(AudioInterrupted) == []
    kinds = [message["type"] for message in server.connection.received]
    assert kinds == ["session.update", "conversation.item.create", "response.create"]


# --- the end -------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [1000, 1001])
async def test_a_server_that_closes_in_the_regular_way(
    model: OpenAIRealtime, server: RealtimeServer, heard: Heard, code: int
) -> None:
    await opened(model, server)
    await server.connection.close(code)
    assert (await heard.wait(ConnectionEnded)).error is None
    with pytest.raises(RealtimeLost, match="the server has closed it"):
        await model.send_event(HI)
    await model.close()
    assert len(heard.all(ConnectionEnded)) == 1


async def test_a_server_that_closes_with_an_error(
    model: OpenAIRealtime, server: RealtimeServer, heard: Heard
) -> None:
    await opened(model, server)
    await server.connection.close(1011, "session expired")
    ended = await heard.wait(ConnectionEnded)
    assert isinstance(ended.error, RealtimeLost)
    for command in (HI, UpdateSettings(agent()), Interrupt()):
        with pytest.raises(RealtimeLost, match=r"1011 .*session expired"):
            await model.send_event(command)


async def test_a_connection_that_is_cut(
    model: OpenAIRealtime, server: RealtimeServer, heard: Heard
) -> None:
    await opened(model, server)
    server.connection.abort()
    ended = await heard.wait(ConnectionEnded)
    assert isinstance(ended.error, RealtimeLost)
    await opened(model, server)  # the lost connection is in nobody's way


async def test_a_message_that_is_too_long(server: RealtimeServer) -> None:
    model, heard = OpenAIRealtime(max_message_bytes=10_000), Heard()
    model.add_listener(heard)
    await opened(model, server)
    await server.send({"type": "of_tomorrow", "text": "x" * 9000})
    await heard.wait(ServerEvent)
    await server.send({"type": "of_tomorrow", "text": "x" * 10_000})
    ended = await heard.wait(ConnectionEnded)
    assert "1009" in str(ended.error)
    await model.close()


async def test_a_server_that_answers_no_ping(server: RealtimeServer) -> None:
    model, heard = (
        OpenAIRealtime(ping_interval_s=0.02, ping_timeout_s=0.02, close_timeout_s=0.1),
        Heard(),
    )
    model.add_listener(heard)
    await opened(model, server)
    server.connection.pause_reading()
    ended = await heard.wait(ConnectionEnded)
    assert "ping" in str(ended.error)
    await model.close()


async def test_close_says_nothing_and_may_be_repeated(
    model: OpenAIRealtime, server: RealtimeServer, heard: Heard
) -> None:
    await model.close()
    await opened(model, server)
    await asyncio.gather(model.close(), model.close(), model.close())
    await model.close()
    await server.wait_for_open(0)
    assert server.connection.close_code == 1000
    assert heard.all(ConnectionEnded) == []
    with pytest.raises(RealtimeLost, match="it is not open"):
        await model.send_event(HI)


async def test_close_leaves_nothing_behind(model: OpenAIRealtime, server: RealtimeServer) -> None:
    held = Hold()
    server.add(speaks("Hello", held))
    await opened(model, server)
    before = asyncio.all_tasks()
    await model.send_event(HI)
    await held.reached()
    await model.close()
    assert {task for task in before if "realtime reader" in task.get_name()} <= {
        task for task in before if task.done()
    }
    held.release()


async def test_close_in_the_middle_of_a_pause(
    model: OpenAIRealtime,
    server: RealtimeServer,
    heard: Heard,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server.add("Hello.")
    await opened(model, server)
    heard.on = lambda _: asyncio.Event().wait()  # type: ignore[assignment, return-value]
    await model.send_event(HI)
    await heard.wait(ItemChanged)
    await model.close()
    await server.wait_for_open(0)
    gc.collect()
    assert caplog.records == [], "nothing is left that was not awaited"


async def test_close_from_what_the_reader_waits_for(
    model: OpenAIRealtime, server: RealtimeServer, heard: Heard
) -> None:
    server.add("Hello.")
    await opened(model, server)
    heard.on = lambda _: model.close()
    await model.send_event(HI)
    await server.wait_for_open(0)


async def test_close_from_a_listener(
    model: OpenAIRealtime, server: RealtimeServer, heard: Heard
) -> None:
    server.add("Hello.")
    await opened(model, server)
    closes: list[asyncio.Task[None]] = []

    def close(event: ModelEvent) -> None:
        closes.append(asyncio.create_task(model.close()))

    heard.on = close
    await model.send_event(HI)
    await server.wait_for_open(0)
    await asyncio.gather(*closes)


async def test_a_cancelled_close_goes_on(model: OpenAIRealtime, server: RealtimeServer) -> None:
    await opened(model, server)
    closing = asyncio.create_task(model.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await model.close()
    await server.wait_for_open(0)


async def test_a_server_that_does_not_answer_the_close_is_left(server: RealtimeServer) -> None:
    model = OpenAIRealtime(close_timeout_s=0.1)
    await opened(model, server)
    connection = server.connection
    connection.pause_reading()
    await model.close()
    connection.resume_reading()
    await server.wait_for_open(0)


async def test_a_close_while_the_server_takes_no_writes() -> None:
    async with RealtimeServer(receive_buffer_bytes=4096) as server:
        model = OpenAIRealtime(close_timeout_s=0.1)
        await opened(model, server)
        server.connection.pause_reading()
        audio = SendAudio(bytes(1 << 22))
        sending = [asyncio.create_task(model.send_event(audio)) for _ in range(3)]
        await asyncio.sleep(0)
        assert not any(task.done() for task in sending)
        await model.close()
        for task in sending:
            with pytest.raises(RealtimeLost):
                await task


async def test_a_cancelled_write_was_made(model: OpenAIRealtime, server: RealtimeServer) -> None:
    """A caller that gives up while the buffer is full has asked for an answer, too."""
    server.add("Hello.")
    await opened(model, server)
    server.connection.pause_reading()
    flood = [asyncio.create_task(model.send_event(SendAudio(bytes(1 << 22)))) for _ in range(3)]
    await asyncio.sleep(0)
    sending = asyncio.create_task(model.send_event(HI))
    await asyncio.sleep(0)
    assert not sending.done()
    sending.cancel()
    server.connection.resume_reading()
    await server.wait_for("response.create")
    await asyncio.gather(*flood)


async def test_nothing_grows_with_the_turns(
    model: OpenAIRealtime, server: RealtimeServer, heard: Heard
) -> None:
    await opened(model, server)

    async def turn(number: int) -> None:
        held = Hold()
        server.add(speaks("Hello", held))
        await model.send_event(HI)
        await heard.wait(AudioDelta)
        await model.send_event(Interrupt())
        await heard.wait(ResponseEnded)
        await heard.wait(ItemTruncated)
        heard.events.clear()

    assert model._connection is not None
    protocol = model._connection._protocol
    for number in range(20):
        await turn(number)
    gc.collect()
    assert len(protocol._audio) == 0
    assert len(protocol._gate._sent) <= 4
    assert protocol.updates._unanswered == {}
