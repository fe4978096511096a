"""Items of a realtime session are stored once, in order, whatever fails."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule_tasks.errors import (
    HistoryNoAnswer,
    InvalidRunState,
    InvalidSetting,
    ItemTooLarge,
    StorageUnavailable,
)
from capsule_tasks.realtime.conversation import HistoryWriter
from capsule_tasks.realtime.conversation.versions import Correction
from capsule_tasks.runs import AgentId, PendingCall, RunState, ServerConversation
from capsule_tasks.runs.conversation import conversation_of
from capsule_tasks.runs.identity import ToolKey
from capsule_tasks.runs.items import digest
from capsule_tasks.runs.records import Item

Fault = Literal["", "before", "after"]
A, B, C, D = ({"role": "user", "content": letter} for letter in "abcd")
CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "sunny"}
AGENT = AgentId("host")


class ListHistory:
    """A history in memory whose next writes fail, before they are done or after, as planned."""

    def __init__(self, *items: Item, faults: tuple[Fault, ...] = ()) -> None:
        self.items = list(items)
        self.faults = list(faults)
        self.batches: list[list[Item]] = []
        self.open = asyncio.Event()
        self.open.set()
        self.writing = asyncio.Event()
        self.session_settings: Any = None

    async def get_items(self, limit: int | None = None) -> list[Item]:
        return self.items if limit is None else self.items[max(0, len(self.items) - limit) :]

    async def add_items(self, items: list[Item]) -> None:
        assert not self.writing.is_set(), "two writes at a time"
        self.writing.set()
        try:
            await self.open.wait()
            fault = self.faults.pop(0) if self.faults else ""
            if fault != "before":
                self.add(items)
            if fault:
                raise StorageUnavailable(f"lost {fault} the write")
        finally:
            self.writing.clear()

    def add(self, items: list[Item]) -> None:
        if any(item.get("content") == "too large" for item in items):
            at = next(n for n, item in enumerate(items) if item.get("content") == "too large")
            raise ItemTooLarge(at, 2, 1)
        self.batches.append(list(items))
        self.items += items


class KnowingHistory(ListHistory):
    """A history that knows a repeated write, as `History` does."""

    def __init__(self, *items: Item, faults: tuple[Fault, ...] = ()) -> None:
        super().__init__(*items, faults=faults)
        self.known: set[str] = set()
        self.operation = ""

    async def add_items(self, items: list[Item], *, operation_id: str = "") -> None:
        self.operation = operation_id
        await super().add_items(items)

    def add(self, items: list[Item]) -> None:
        if self.operation not in self.known:
            super().add(items)
            self.known.add(self.operation)


class BlockingHistory:
    """A history for callers that block."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.threads: set[int] = set()

    def get_items(self, limit: int | None = None) -> list[Item]:
        self.threads.add(threading.get_ident())
        return self.items

    def add_items(self, items: list[Item]) -> None:
        self.threads.add(threading.get_ident())
        self.items += items


def no_report(error: Exception) -> None:
    raise AssertionError(error)


def writer_of(history: Any, state: RunState | None = None, report: Any = no_report) -> Any:
    return HistoryWriter(history, state or state_of(), report)


def state_of(**fields: Any) -> RunState:
    return RunState(run_id="r", start_agent=AGENT, agent=AGENT, **fields)


def others() -> set[asyncio.Task[Any]]:
    return asyncio.all_tasks() - {asyncio.current_task()}  # type: ignore[arg-type]


async def test_items_are_stored_in_the_background_in_order() -> None:
    history = ListHistory()
    writer = writer_of(history)
    assert await writer.begin() == ()
    writer.add([A])
    writer.add([])
    writer.add([B, C])
    assert history.items == []
    await writer.flush()
    assert history.items == [A, B, C]
    assert not others()
    await writer.flush()
    assert history.batches == [[A, B, C]]


async def test_items_that_gather_during_a_write_are_one_batch() -> None:
    history = ListHistory()
    history.open.clear()
    writer = writer_of(history)
    writer.add([A])
    await history.writing.wait()
    writer.add([B])
    writer.add([C])
    history.open.set()
    await writer.flush()
    assert history.batches == [[A], [B, C]]


async def test_a_failed_write_is_reported_once_and_made_again_with_the_next_items() -> None:
    reported: list[Exception] = []
    history = ListHistory(faults=("before", "before", "", "before"))
    writer = writer_of(history, report=reported.append)
    for item in (A, B, C, D):
        writer.add([item])
        await asyncio.gather(*others())
    assert (history.batches, len(reported)) == ([[A], [B, C], [D]], 2)


async def test_flush_raises_the_error_and_may_be_repeated() -> None:
    history = ListHistory(faults=("before", "before"))
    writer = writer_of(history, report=lambda _: None)
    writer.add([A])
    for _ in range(2):
        with pytest.raises(StorageUnavailable):
            await writer.flush()
        assert not others()
    await writer.flush()
    assert history.items == [A]


@pytest.mark.parametrize(("kind", "again"), [(KnowingHistory, []), (ListHistory, [A, B])])
async def test_a_write_that_was_done_although_it_failed_is_repeated_under_its_id(
    kind: type[ListHistory], again: list[Item]
) -> None:
    """A history that knows no ids of writes may have items twice; it never lacks one."""
    history = kind(A, faults=("after",))
    writer = writer_of(history, report=lambda _: None)
    writer.add([A, B])
    await asyncio.gather(*others())
    assert history.items == [A, A, B]
    writer.add([C])
    await writer.flush()
    assert history.items == [A, A, B, *again, C]


async def test_an_item_that_the_history_refuses_holds_up_no_other() -> None:
    reported: list[Exception] = []
    large = {"role": "user", "content": "too large"}
    history = ListHistory()
    writer = writer_of(history, report=reported.append)
    writer.add([A, large, B])
    await asyncio.gather(*others())
    assert history.items == [A, B]
    assert len(reported) == 1
    writer.add([C])
    for _ in range(2):
        with pytest.raises(ItemTooLarge):
            await writer.flush()
    assert history.items == [A, B, C]
    assert writer.in_state(state_of()).held_items == [large]


async def test_a_history_that_cannot_replace_items_keeps_what_it_has() -> None:
    history = ListHistory()
    writer = writer_of(history)
    writer.add([A, B])
    writer.add([Correction(B, C), D])
    await writer.flush()
    assert history.items == [A, B, D]
    assert history.batches == [[A, B, D]]
    assert writer.in_state(state_of()).first_item == digest(A)


async def test_items_of_the_state_are_corrected() -> None:
    writer = writer_of(None)
    writer.add([A, B, C, B])
    writer.add([Correction(B, D), Correction(C, None), Correction({"role": "x"}, None)])
    assert writer.in_state(state_of()).held_items == [A, B, D]


async def test_a_cancel_of_flush_does_not_stop_the_write() -> None:
    history = ListHistory()
    history.open.clear()
    writer = writer_of(history)
    writer.add([A])
    flushing = asyncio.create_task(writer.flush())
    await history.writing.wait()
    flushing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await flushing
    history.open.set()
    await writer.flush()
    assert history.batches == [[A]]
    assert not others()


async def test_a_flush_gives_up_waiting_and_a_repeat_waits_for_the_same_write() -> None:
    history = ListHistory()
    history.open.clear()
    writer = writer_of(history)
    writer.add([A])
    for _ in range(2):
        with pytest.raises(HistoryNoAnswer, match=r"'ListHistory' has not stored .* within 0.01 s"):
            await writer.flush(0.01)
    history.open.set()
    await writer.flush(5)
    assert history.batches == [[A]]
    assert not others()


@pytest.mark.parametrize(
    "error", [SystemExit(3), GeneratorExit(), asyncio.CancelledError()], ids=repr
)
async def test_whatever_a_history_raises_is_reported_and_raised_by_flush(
    error: BaseException,
) -> None:
    class Raising(ListHistory):
        def add(self, items: list[Item]) -> None:
            if not reported:
                raise error
            super().add(items)

    reported: list[Exception] = []
    history = Raising()
    writer = writer_of(history, report=reported.append)
    writer.add([A])
    with pytest.raises(RuntimeError, match=f"the history raised {type(error).__name__}"):
        await writer.flush()
    assert len(reported) == 1
    await writer.flush()
    assert history.items == [A]


async def test_a_write_that_is_cancelled_from_outside_ends() -> None:
    history = ListHistory()
    history.open.clear()
    writer = writer_of(history)
    writer.add([A])
    await history.writing.wait()
    [task] = others()
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    assert not others()


async def test_a_history_that_blocks_is_called_in_a_thread() -> None:
    history = BlockingHistory()
    history.items.append(A)
    writer = writer_of(history)
    [told] = await writer.begin()
    assert told == A
    writer.add([B])
    await writer.flush()
    assert history.items == [A, B]
    assert threading.get_ident() not in history.threads


async def test_the_history_is_read_as_runs_read_it() -> None:
    lost = {"type": "function_call", "call_id": "lost", "name": "look", "arguments": "{}"}
    answer = {"role": "assistant", "content": "b", "status": "completed", "type": "message"}
    assert await writer_of(ListHistory(A, lost, answer)).begin() == (
        A,
        {"role": "assistant", "content": "b", "type": "message"},
    )


async def test_without_a_history_the_state_has_the_items() -> None:
    writer = writer_of(None)
    assert await writer.begin() == ()
    assert writer.in_state(state_of()) == state_of()
    writer.add([A, B])
    await writer.flush()
    state = writer.in_state(state_of())
    assert (state.held_items, state.turn, state.stored_items) == ([A, B], 1, 0)
    again = writer_of(None, state)
    assert await again.begin() == (A, B)
    again.add([C])
    state = again.in_state(state)
    assert state.held_items == [A, B, C]
    assert (await conversation_of(state)).view == [A, B, C]


async def test_items_that_a_state_holds_are_stored_once_there_is_a_history() -> None:
    history = ListHistory(D)
    writer = writer_of(history, state_of(turn=1, held_items=[A, B]))
    assert await writer.begin() == (D,)
    await writer.flush()
    assert history.items == [D, A, B]


async def test_a_state_finds_its_place_in_the_history() -> None:
    history = ListHistory(D)
    writer = writer_of(history)
    await writer.begin()
    writer.add([A])
    await writer.flush()
    writer.add([CALL])
    await writer.flush()
    waiting = PendingCall(call_id="c1", tool=ToolKey("look"), agent=AGENT, arguments="{}")
    state = writer.in_state(state_of().with_calls([waiting]))
    assert (state.stored_items, state.turn, state.held_items) == (2, 1, [])
    assert (await conversation_of(state, history)).view == [D, A, CALL]
    state = RunState.from_string(state.to_string())
    again = writer_of(history, state)
    assert await again.begin() == (D, A, CALL)
    again.add([OUTPUT, B])
    await again.flush()
    after = again.in_state(state)
    assert (after.stored_items, history.items) == (4, [D, A, CALL, OUTPUT, B])
    with pytest.raises(InvalidRunState, match="was made since"):
        await writer_of(history, state).begin()


async def test_a_state_that_has_not_begun_begins_with_its_input() -> None:
    history = ListHistory(A)
    writer = writer_of(history, state_of(input=[B]))
    assert await writer.begin() == (A, B)
    await writer.flush()
    assert history.items == [A, B]
    assert writer.in_state(state_of(input=[B])).input == ""


async def test_a_conversation_of_another_server_is_refused() -> None:
    state = state_of(conversation=ServerConversation("conv_1"))
    with pytest.raises(InvalidSetting, match="items are in its history"):
        await writer_of(None, state).begin()


@given(
    st.lists(st.sampled_from(["add", "loop", "flush"]), max_size=12),
    st.lists(st.sampled_from(["", "before", "after"]), max_size=8),
)
def test_whatever_fails_each_item_is_stored_once_and_in_order(
    steps: list[str], faults: list[Any]
) -> None:
    async def run() -> None:
        history = KnowingHistory(faults=tuple(faults))
        writer = writer_of(history, report=lambda _: None)
        added: list[Item] = []
        for step in [*steps, *(["flush"] * (len(faults) + 1))]:
            if step == "add":
                added.append({"role": "user", "content": str(len(added))})
                writer.add(added[-1:])
            elif step == "loop":
                await asyncio.sleep(0)
            else:
                try:
                    await writer.flush()
                except StorageUnavailable:
                    continue
                assert history.items == added
            assert history.items == added[: len(history.items)]
        assert not others()
        state = writer.in_state(state_of())
        assert (state.stored_items, state.held_items) == (len(added), [])

    asyncio.run(run())
