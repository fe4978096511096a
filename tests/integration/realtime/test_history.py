"""The history of realtime sessions, over a real socket and in a real store."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from capsule_tasks import Agent, History, Runner, SyncHistory, function_tool
from capsule_tasks.errors import RealtimeLost, StorageUnavailable
from capsule_tasks.realtime import (
    RealtimeConfig,
    RealtimeModelConfig,
    RealtimeRunner,
    RealtimeSettings,
)
from capsule_tasks.realtime.conversation.versions import WITHOUT_TRANSCRIPT
from capsule_tasks.realtime.model import SendRaw
from capsule_tasks.realtime.playback import PlaybackTracker
from capsule_tasks.runs import RunState
from capsule_tasks.runs.conversation import conversation_of
from capsule_tasks.runs.items import for_model
from capsule_tasks.runs.records import Item
from capsule_tasks.settings import HistorySettings
from capsule_tasks.testing.models import ScriptedModel, calls
from capsule_tasks.testing.realtime import Hold, RealtimeServer, speaks
from capsule_tasks.testing.servers import PrivateServer, free_port
from tests.integration.histories import ONCE, own_settings

ROOT = Path(__file__).parents[3]
TRANSCRIBED = RealtimeSettings(transcription={"model": "whisper-1"})


@pytest.fixture
async def history(valkey_url: str, prefix: str) -> AsyncIterator[History]:
    async with History("s1", valkey_url, settings=HistorySettings(prefix=prefix)) as history:
        yield history


@function_tool
def look(place: str) -> str:
    """Look at a place."""
    return f"{place} is sunny"


AGENT = Agent(name="Guide", tools=[look])
LOOK = calls("look", {"place": "Oslo"}, "c1")


def session_of(
    server: RealtimeServer, history: Any = None, agent: Agent = AGENT, **options: Any
) -> Any:
    state = options.pop("state", None)
    # Audio is played to its end, unless a test says how much of it was.
    tracker = options.pop("tracker", None) or PlaybackTracker()
    reach = RealtimeModelConfig(
        url=server.url, api_key="key", settings=TRANSCRIBED, playback_tracker=tracker
    )
    runner = RealtimeRunner(agent, config=RealtimeConfig(**options))
    return runner.run(None, reach, history=history, state=state)


async def until(session: Any, kind: str, count: int = 1) -> Any:
    """The event of a type that comes as the `count`th."""
    async with asyncio.timeout(5):
        async for event in session:
            if event.type == kind:
                count -= 1
                if count == 0:
                    return event
    raise AssertionError(f"no event {kind!r}")


async def until_stored(history: History, count: int) -> list[Item]:
    async with asyncio.timeout(5):
        while len(items := await history.get_items()) < count:
            pass
    return items


def spelled(items: list[Item]) -> list[str]:
    """Each item in short: who said what."""
    return [_spelled(item) for item in items]


def _spelled(item: Item) -> str:
    match item.get("type", "message"):
        case "message":
            content = item["content"]
            if not isinstance(content, str):
                texts = [part.get("text") or part.get("transcript") or "" for part in content]
                content = " / ".join(texts)
            half = " (incomplete)" if item.get("status") == "incomplete" else ""
            return f"{item['role']}: {content}{half}"
        case "function_call":
            return f"call {item['name']}"
        case "function_call_output":
            return f"output: {item['output']}"
        case kind:
            return str(kind)


# --- what is stored, and when --------------------------------------------------------------------


async def test_a_spoken_conversation_is_stored_in_the_words_of_runs(
    server: RealtimeServer, history: History
) -> None:
    """The transcript of what the user said comes after the answer to it, and after a tool."""
    server.add(LOOK, speaks("It is sunny there."), speaks("Good bye."))
    async with session_of(server, history) as session:
        item_id = await server.user_speaks()
        await until(session, "agent_end", 2)
        assert await history.get_items() == []
        await server.connection.transcribe(item_id, "What is Oslo like?")
        assert spelled(await until_stored(history, 4)) == [
            "user: What is Oslo like?",
            "call look",
            "output: Oslo is sunny",
            "assistant: It is sunny there.",
        ]
        await server.user_speaks("Thanks.")
        assert len(await until_stored(history, 6)) == 6
        live = session.history
    items = await history.get_items()
    assert spelled(live) == spelled(items)
    assert [part["type"] for item in live for part in item.get("content", ())] == [
        *("input_audio", "output_audio", "input_audio", "output_audio")
    ]
    assert [sorted(item) for item in items[:4]] == [
        ["content", "role", "type"],
        ["arguments", "call_id", "name", "type"],
        ["call_id", "output", "type"],
        ["content", "role", "type"],
    ]
    assert items[3]["content"] == [{"type": "output_text", "text": "It is sunny there."}]


async def test_a_history_that_blocks_is_as_good(
    server: RealtimeServer, valkey_url: str, prefix: str
) -> None:
    with SyncHistory("s1", valkey_url, settings=HistorySettings(prefix=prefix)) as history:
        history.add_items([{"role": "user", "content": "Hello."}])
        server.add(LOOK, speaks("It is sunny."))
        async with session_of(server, history) as session:
            await session.send_message("How is Oslo?")
            await until(session, "agent_end", 2)
        assert spelled(history.get_items()) == [
            "user: Hello.",
            "user: How is Oslo?",
            "call look",
            "output: Oslo is sunny",
            "assistant: It is sunny.",
        ]


async def test_transcripts_that_fail_or_never_come_hold_up_nothing(
    server: RealtimeServer, history: History
) -> None:
    server.add(*[speaks(f"answer {number}") for number in range(4)])
    async with session_of(server, history) as session:
        first = await server.user_speaks()
        await until(session, "agent_end")
        await server.connection.fail_transcription(first)
        assert spelled(await until_stored(history, 2)) == [
            f"user: {WITHOUT_TRANSCRIPT}",
            "assistant: answer 0",
        ]
        late = await server.user_speaks()
        await until(session, "agent_end")
        await server.user_speaks("heard")
        assert len(await until_stored(history, 6)) == 6
        await server.connection.transcribe(late, "too late to be stored")
        while spelled(session.history)[2] != "user: too late to be stored":
            await until(session, "history_updated")
        await server.user_speaks()
        await until(session, "agent_end")
    assert spelled(await history.get_items())[2:] == [
        f"user: {WITHOUT_TRANSCRIPT}",
        "assistant: answer 1",
        "user: heard",
        "assistant: answer 2",
        f"user: {WITHOUT_TRANSCRIPT}",
        "assistant: answer 3",
    ]


async def test_an_answer_that_is_interrupted_while_it_is_made_has_what_was_heard(
    server: RealtimeServer, history: History
) -> None:
    hold, tracker = Hold(), PlaybackTracker()
    server.add(speaks("one two three four ", hold, "five six"), speaks("Sorry."))
    async with session_of(server, history, tracker=tracker) as session:
        await session.send_message("Count.")
        await hold.reached()
        audio = await until(session, "audio", 2)
        tracker.on_play_ms(audio.item_id, 0, 100)  # of 190
        await session.interrupt()
        await until(session, "agent_end")
        await session.send_message("Stop.")
        await until(session, "agent_end")
        assert spelled(session.history) == spelled(await until_stored(history, 4))
    assert spelled(await history.get_items()) == [
        *("user: Count.", "assistant: one two (incomplete)", "user: Stop.", "assistant: Sorry.")
    ]


@pytest.mark.parametrize(
    ("played_ms", "heard"), [(100, ["assistant: one two (incomplete)"]), (0, [])]
)
async def test_an_answer_that_is_interrupted_while_it_is_played_is_corrected(
    server: RealtimeServer, history: History, played_ms: int, heard: list[str]
) -> None:
    """The answer was made, and stored, long before the user has heard its end."""
    tracker = PlaybackTracker()
    server.add(speaks("one two three four five six"), speaks("Sorry."))
    async with session_of(server, history, tracker=tracker) as session:
        await session.send_message("Count.")
        audio = await until(session, "audio")
        await until(session, "agent_end")
        stored = await until_stored(history, 2)
        assert spelled(stored)[1] == "assistant: one two three four five six"
        tracker.on_play_ms(audio.item_id, 0, played_ms)
        await server.user_speaks("Stop.")
        await until(session, "agent_end")
    items = await history.get_items()
    assert spelled(items) == ["user: Count.", *heard, "user: Stop.", "assistant: Sorry."]
    state = session.state
    assert state.stored_items == len(items)
    assert (await conversation_of(state, history)).view == for_model(items)


async def test_an_item_that_is_deleted_before_it_is_final_is_not_stored(
    server: RealtimeServer, history: History
) -> None:
    server.add(speaks("first"), speaks("second"))
    async with session_of(server, history) as session:
        deleted = await server.user_speaks()
        await until(session, "agent_end")
        await session.model.send_event(
            SendRaw({"type": "conversation.item.delete", "item_id": deleted})
        )
        await until_stored(history, 1)
        await session.send_message("Hello.")
        await until(session, "agent_end")
        assert "user: " not in spelled(session.history)
    assert spelled(await history.get_items()) == [
        "assistant: first",
        "user: Hello.",
        "assistant: second",
    ]


# --- ends ----------------------------------------------------------------------------------------


async def test_a_connection_that_dies_in_the_middle_of_an_answer_loses_nothing(
    server: RealtimeServer, history: History
) -> None:
    server.add(speaks("whole"), speaks("only half of ", Hold(), "it"))
    async with session_of(server, history) as session:
        await session.send_message("One.")
        await until(session, "agent_end")
        await server.user_speaks()
        await until(session, "audio")
        server.connection.abort()
        with pytest.raises(RealtimeLost):
            await until(session, "the end")
    assert spelled(await history.get_items()) == [
        "user: One.",
        "assistant: whole",
        f"user: {WITHOUT_TRANSCRIPT}",
        "assistant: only half of  (incomplete)",
    ]


async def test_what_was_final_survives_the_death_of_the_process(
    server: RealtimeServer, valkey_url: str, prefix: str
) -> None:
    server.add(LOOK, speaks("It is sunny."), speaks("Not all of ", Hold(), "this."))
    program = [sys.executable, "-c", PROGRAM, server.url, valkey_url, prefix]
    process = await asyncio.create_subprocess_exec(*program, cwd=ROOT)
    try:
        # On a busy machine a process takes longer to start than the server waits by default.
        await server.wait_for("session.update", timeout_s=60)
        await server.user_speaks("What is Oslo like?")
        await server.wait_for("response.create")
        await server.wait_until(lambda: len(server.connection.conversation.items) == 4, "items")
        async with History("s1", valkey_url, settings=HistorySettings(prefix=prefix)) as history:
            await until_stored(history, 4)
            await server.user_speaks("And Bergen?")
            stored = await until_stored(history, 5)
            process.send_signal(signal.SIGKILL)
            await process.wait()
            assert await history.get_items() == stored
            assert spelled(stored) == [
                "user: What is Oslo like?",
                "call look",
                "output: Oslo is sunny",
                "assistant: It is sunny.",
                "user: And Bergen?",
            ]
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


PROGRAM = """
import asyncio, sys
from capsule_tasks import History
from capsule_tasks.settings import HistorySettings
from tests.integration.realtime.test_history import session_of

class Server:
    url = sys.argv[1]

async def main():
    settings = HistorySettings(prefix=sys.argv[3])
    async with History("s1", sys.argv[2], settings=settings) as history:
        async with session_of(Server, history) as session:
            async for event in session:
                pass

asyncio.run(main())
"""


async def test_a_history_that_cannot_be_written_is_an_event_and_close_may_be_tried_again(
    server: RealtimeServer, tmp_path: Path
) -> None:
    server.add(speaks("One."), speaks("Two."))
    with PrivateServer(tmp_path / "redis", aof=True, port=free_port()) as redis:
        async with History("s1", redis.url, settings=own_settings(ONCE)) as history:
            session = session_of(server, history)
            await session.__aenter__()
            redis.stop()
            await session.send_message("First.")
            error = await until(session, "error")
            assert isinstance(error.error, StorageUnavailable)
            await session.send_message("Second.")
            await until(session, "agent_end")
            with pytest.raises(StorageUnavailable):
                await session.close()
            assert not server.open_connections
            redis.start()
            await session.close()
            assert spelled(await history.get_items()) == [
                *("user: First.", "assistant: One.", "user: Second.", "assistant: Two.")
            ]


# --- who goes on ---------------------------------------------------------------------------------


async def test_sessions_and_runs_go_on_with_one_history(
    server: RealtimeServer, history: History
) -> None:
    """A run, a session that hears of it, a run that hears of both, and a session again."""
    model = ScriptedModel([LOOK, "In Oslo.", "As I said."])
    agent = AGENT.clone(model=model)
    server.add(speaks("Yes, it is sunny."), LOOK, speaks("Still sunny."))
    await Runner.run(agent, "Where are you?", session=history)
    before = ["user: Where are you?", "call look", "output: Oslo is sunny", "assistant: In Oslo."]
    async with session_of(server, history, agent) as session:
        assert await told_to(server, 4) == before
        await server.user_speaks("Is it sunny?")
        await until(session, "agent_end")
        spoken = ["user: Is it sunny?", "assistant: Yes, it is sunny."]
        assert spelled(session.history) == before + spoken
    assert spelled(await history.get_items()) == before + spoken
    await Runner.run(agent, "Sure?", session=history)
    written = ["user: Sure?", "assistant: As I said."]
    assert spelled(model.requests[-1].input) == [*before, *spoken, "user: Sure?"]
    async with session_of(server, history, agent) as session:
        assert await told_to(server, 8) == before + spoken + written
        await session.send_message("And now?")
        await until(session, "agent_end", 2)
    again = ["user: And now?", "call look", "output: Oslo is sunny", "assistant: Still sunny."]
    assert spelled(await history.get_items()) == before + spoken + written + again
    events = [item.get("id") for item in session.history]
    assert len(set(events)) == len(events)


async def told_to(server: RealtimeServer, count: int) -> list[str]:
    """The items of the conversation that the server of the last connection has, once so many."""
    items = server.connection.conversation.items
    await server.wait_until(lambda: len(items) >= count, f"{count} items")
    return spelled(items)


@pytest.mark.parametrize("by", ["session", "run"])
@pytest.mark.parametrize("has_history", [True, False], ids=["history", "state"])
async def test_a_call_that_waits_is_made_by_the_session_or_the_run_that_goes_on(
    server: RealtimeServer, history: History, *, has_history: bool, by: str
) -> None:
    kept = history if has_history else None
    agent = AGENT.clone(
        tools=[function_tool(needs_approval=True)(visit)], model=ScriptedModel(["I was there."])
    )
    server.add(calls("visit", {"place": "Oslo"}, "c1"), speaks("I was there."))
    async with session_of(server, kept, agent) as session:
        await session.send_message("Go to Oslo.")
        await until(session, "tool_approval_required")
    state = RunState.from_string(session.state.to_string())
    before = ["user: Go to Oslo.", "call visit"]
    assert spelled(await history.get_items() if kept else state.held_items) == before
    after = [*before, "output: visited Oslo", "assistant: I was there."]
    if by == "run":
        ended = await Runner.run(agent, state.approve("c1"), session=kept)
        assert ended.final_output == "I was there."
    else:
        async with session_of(server, kept, agent, state=state) as session:
            assert await told_to(server, 2) == before
            await until(session, "tool_approval_required")
            await session.approve_tool_call("c1")
            await until(session, "agent_end")
        if not kept:
            assert spelled(session.state.held_items) == after
    if kept:
        assert spelled(await history.get_items()) == after


def visit(place: str) -> str:
    """Visit a place."""
    return f"visited {place}"


async def test_a_long_history_is_told_up_to_its_limit(
    server: RealtimeServer, valkey_url: str, prefix: str
) -> None:
    settings = HistorySettings(prefix=prefix)
    options: dict[str, Any] = {"settings": settings, "session_settings": {"limit": 3}}
    async with History("s1", valkey_url, **options) as history:
        earlier = [{"role": "user", "content": f"{number}"} for number in range(9)]
        await history.add_items(earlier)
        server.add(speaks("Nine."))
        async with session_of(server, history) as session:
            assert await told_to(server, 3) == ["user: 6", "user: 7", "user: 8"]
            await session.send_message("And?")
            await until(session, "agent_end")
            assert len(session.history) == 5
        items = await history.get_items(100)
        assert spelled(items[9:]) == ["user: And?", "assistant: Nine."]
