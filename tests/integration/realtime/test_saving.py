"""Items of realtime sessions in real histories: outages, lost replies, who goes on with them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from capsule_tasks import Agent, History, Runner, SyncHistory
from capsule_tasks.errors import HistoryFull, StorageUnavailable
from capsule_tasks.realtime.conversation import ConversationLog, HistoryWriter
from capsule_tasks.realtime.conversation.versions import Correction
from capsule_tasks.realtime.model import InputTranscribed, ItemChanged, ItemTruncated
from capsule_tasks.runs import AgentId, RunState
from capsule_tasks.runs.items import digest
from capsule_tasks.runs.records import Item
from capsule_tasks.settings import HistorySettings
from capsule_tasks.storage.awaiting import result_of
from capsule_tasks.testing.models import ScriptedModel
from capsule_tasks.testing.servers import PrivateServer, free_port
from tests.cutting_proxy import CuttingProxy
from tests.integration.histories import ONCE, own_settings

A, B, C = ({"role": "user", "content": letter} for letter in "abc")
STATE = RunState(run_id="r", start_agent=AgentId("host"), agent=AgentId("host"))


@pytest.fixture(scope="module")
def proxy(valkey_url: str) -> Iterator[CuttingProxy]:
    port = int(valkey_url.rpartition(":")[2].partition("/")[0])
    with CuttingProxy(port) as proxy:
        yield proxy


async def until_written(writer: Any) -> None:
    """Wait for the write in the background, whether it fails or not."""
    while (tasks := asyncio.all_tasks() - {asyncio.current_task()}) and writer:
        await asyncio.wait(tasks)


async def stored(history: Any) -> list[Item]:
    items: list[Item] = await result_of(history.get_items())
    return items


async def closed(history: Any) -> None:
    await result_of(history.close())


async def test_a_lost_reply_stores_nothing_twice(proxy: CuttingProxy) -> None:
    reported: list[Exception] = []
    async with History("s1", proxy.url, settings=own_settings(ONCE)) as history:
        await history.add_items([A])
        writer = HistoryWriter(history, STATE, reported.append)
        assert await writer.begin() == (A,)
        proxy.plan(["after", "before", "after"])
        writer.add([B])
        await until_written(writer)
        assert len(reported) == 1
        writer.add([C])
        for _ in range(2):
            with pytest.raises(StorageUnavailable):
                await writer.flush()
        await writer.flush()
        assert await history.get_items() == [A, B, C]
        assert writer.in_state(STATE).stored_items == 2
    assert len(reported) == 1


async def test_items_wait_for_a_server_that_comes_back(tmp_path: Path) -> None:
    reported: list[Exception] = []
    with PrivateServer(tmp_path / "redis", aof=True, port=free_port()) as server:
        async with History("s1", server.url, settings=own_settings(ONCE)) as history:
            writer = HistoryWriter(history, STATE, reported.append)
            writer.add([A])
            await writer.flush()
            server.stop()
            for item in (B, C):
                writer.add([item])
                await until_written(writer)
            with pytest.raises(StorageUnavailable):
                await writer.flush()
            assert writer.in_state(STATE).held_items == [B, C]
            server.start()
            await writer.flush()
            assert await history.get_items() == [A, B, C]
    assert len(reported) == 1


@pytest.mark.parametrize("kind", [History, SyncHistory])
async def test_an_answer_is_corrected_in_one_step_whatever_was_stored_after_it(
    proxy: CuttingProxy, kind: type[History]
) -> None:
    history = kind("s1", proxy.url, settings=own_settings(ONCE))
    writer = HistoryWriter(history, STATE, lambda _: None)
    writer.add([A, B])
    await writer.flush()
    assert await stored(history) == [A, B]
    for correction, proxied, wanted in (
        (Correction(B, C), [], [A, C]),
        (Correction(C, B), ["pass", "after"], [A, B]),
        (Correction(A, C), ["before"], [C, B]),
        (Correction(B, None), [], [C]),
        (Correction(B, A), [], [C]),
    ):
        proxy.plan(proxied)
        writer.add([correction])
        await writer.flush() if not proxied else await until_written(writer)
        await writer.flush()
        assert await stored(history) == wanted
        state = writer.in_state(STATE)
        ends = [digest(wanted[0]), digest(wanted[-1])]
        assert [state.first_item, state.last_item] == ends
        assert state.stored_items == len(wanted)
    writer.add([Correction(C, None)])
    await writer.flush()
    assert writer.in_state(STATE) == STATE
    await closed(history)


async def test_a_full_history_says_so_until_there_is_room(valkey_url: str) -> None:
    settings = HistorySettings(prefix=own_settings().prefix, max_items=3)
    async with History("s1", valkey_url, settings=settings) as history:
        await history.add_items([A])
        writer = HistoryWriter(history, STATE, lambda _: None)
        writer.add([A, B, C])
        with pytest.raises(HistoryFull):
            await writer.flush()
        await history.clear_session()
        await writer.flush()
        assert await history.get_items() == [A, B, C]


@pytest.mark.parametrize("kind", [History, SyncHistory])
async def test_runs_and_realtime_sessions_go_on_with_each_others_history(
    valkey_url: str, prefix: str, kind: type[History]
) -> None:
    """A text run, a spoken conversation, a text run that sees both, and back."""
    history = kind("s1", valkey_url, settings=HistorySettings(prefix=prefix))
    model = ScriptedModel(["hello", "goodbye"])
    agent = Agent(name="host", model=model)
    await Runner.run(agent, "hi", session=history)
    log, writer = ConversationLog(), HistoryWriter(history, STATE, lambda _: None)
    told = log.load(await writer.begin())
    assert [item["role"] for item in told] == ["user", "assistant"]
    spoken = {"id": "item_1", "object": "realtime.item", "type": "message", "status": "completed"}
    heard = [{"type": "input_audio", "transcript": None}]
    said = [{"type": "output_audio", "transcript": "half of this was heard"}]
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
    for event in (
        ItemChanged({**spoken, "role": "user", "content": heard}, told[-1]["id"], is_final=True),
        InputTranscribed("item_1", 0, "how is it"),
        ItemChanged({**spoken, **call, "id": "item_2"}, "item_1", is_final=True),
    ):
        log.apply(event)
    log.add({"type": "function_call_output", "call_id": "c1", "output": "sunny"})
    answer = {**spoken, "id": "item_3", "role": "assistant", "content": said}
    log.apply(ItemChanged(answer, is_final=True))
    log.apply(ItemTruncated("item_3", 0, 500, 1000))
    writer.add(log.take_final())
    await writer.flush()
    ended = await Runner.run(agent, "bye", session=history)
    assert ended.final_output == "goodbye"
    [_, request] = model.requests
    sent = request.input
    assert [item.get("role") or item["type"] for item in sent] == [
        *("user", "assistant", "user", "function_call", "function_call_output", "assistant", "user")
    ]
    assert sent[2]["content"] == [{"type": "input_text", "text": "how is it"}]
    assert sent[5]["content"] == [{"type": "output_text", "text": "half of"}]
    assert not any(str(item.get("id")).startswith("item_") or "object" in item for item in sent)
    again = HistoryWriter(history, writer.in_state(STATE), lambda _: None)
    assert len(await again.begin()) == 8
    await closed(history)
