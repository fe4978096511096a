"""Histories are compacted in one step, whatever others do to them meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from capsule_tasks import History, SyncHistory
from capsule_tasks.errors import CompactionFailed, InvalidSetting, StorageUnavailable
from capsule_tasks.runs.agents.run_config import RunConfig
from capsule_tasks.runs.compaction import (
    Compaction,
    CompactionReport,
    OldItems,
    ResponsesCompactor,
    SummaryCompactor,
    compact,
    compact_sync,
    summary_message,
)
from capsule_tasks.runs.compaction.compacting import Chain
from capsule_tasks.runs.compaction.of_run import CompactedHistory
from capsule_tasks.runs.conversation import View
from capsule_tasks.runs.models import ModelReply, ModelRequest
from capsule_tasks.runs.records import Item, Spent
from capsule_tasks.storage import AsyncConnections
from capsule_tasks.storage.encryption import encrypted
from tests.cutting_proxy import CuttingProxy
from tests.integration.histories import ONCE, own_settings
from tests.integration.killing import cancelled_at

SUMMARY = summary_message("the weather")
SPENT = Spent(requests=1, input_tokens=40, output_tokens=4)
KEY = b"k" * 32


def user(text: str) -> Item:
    return {"role": "user", "content": text}


def says(text: str) -> Item:
    content = [{"type": "output_text", "text": text}]
    return {"type": "message", "role": "assistant", "content": content}


def call(call_id: str) -> Item:
    return {"type": "function_call", "call_id": call_id, "name": "weather", "arguments": "{}"}


def output(call_id: str) -> Item:
    return {"type": "function_call_output", "call_id": call_id, "output": "sunny " * 10}


QUESTION = user("How is the weather in Paris? " * 9)
TALK = [QUESTION, call("1"), output("1"), says("It is sunny.")]


@dataclass
class Fixed:
    """A compactor with one answer, which does something else before it gives it."""

    items: Sequence[Item] = (SUMMARY,)
    first: Callable[[], Awaitable[Any]] | None = None
    keep_last: int = 0
    asked: list[OldItems] = field(default_factory=list)

    async def compacted(self, old: OldItems) -> ModelReply | None:
        self.asked.append(old)
        if self.first is not None:
            await self.first()
        return ModelReply(items=list(self.items), spent=SPENT)


@dataclass
class Answers:
    """A model with one text for everybody, and a server that compacts."""

    text: str = "the weather"
    asked: list[ModelRequest] = field(default_factory=list)
    compacted: list[tuple[list[Item], str | None]] = field(default_factory=list)

    async def get_response(self, request: ModelRequest) -> ModelReply:
        self.asked.append(request)
        return ModelReply(items=[says(self.text)] if self.text else [], spent=SPENT)

    async def stream_response(self, request: ModelRequest) -> AsyncIterator[ModelReply]:
        yield await self.get_response(request)

    async def compact(
        self,
        items: Sequence[Item],
        *,
        instructions: str | None = None,
        previous_response_id: str | None = None,
    ) -> ModelReply:
        self.compacted.append((list(items), previous_response_id))
        made = {"type": "compaction", "id": "c", "encrypted_content": "…", "created_by": "server"}
        return ModelReply(items=[QUESTION, made], spent=SPENT)


@pytest.fixture
async def history(valkey_url: str) -> AsyncIterator[History]:
    async with History("s", valkey_url, settings=own_settings()) as history:
        await history.add_items(TALK)
        yield history


# --- what is replaced ----------------------------------------------------------------------------


async def test_the_whole_history_becomes_one_message(history: History) -> None:
    report = await compact(history, Fixed())
    assert (report.outcome, report.items, report.replaced_items) == ("replaced", [SUMMARY], 4)
    assert report.spent == SPENT
    assert report.bytes_after < report.bytes_before
    assert await history.get_items() == [SUMMARY]


async def test_the_last_items_stay_with_their_calls(history: History) -> None:
    compactor = Fixed(items=[summary_message("x")])
    await history.add_items([user("And in Rome? " * 9), call("2"), output("2")])
    report = await compact(history, compactor, keep_last=1)
    assert report.outcome == "replaced"
    assert compactor.asked[0].items == [*TALK, user("And in Rome? " * 9)]
    assert await history.get_items() == [summary_message("x"), call("2"), output("2")]


async def test_calls_that_wait_put_a_compaction_off(history: History) -> None:
    compactor = Fixed()
    await history.add_items([user("And in Rome?"), call("2")])
    assert (await compact(history, compactor)).outcome == "waiting"
    assert not compactor.asked
    assert await history.get_items() == [*TALK, user("And in Rome?"), call("2")]


async def test_a_call_of_a_parked_run_gets_its_output_later(history: History) -> None:
    await history.add_items([call("parked"), user("And in Rome?"), says("Sunny, too.")])
    assert (await compact(history, Fixed())).is_replaced
    await history.add_items([output("parked")])
    assert await history.get_items() == [SUMMARY, call("parked"), output("parked")]


async def test_nothing_is_compacted_twice(history: History) -> None:
    compactor = Fixed()
    for expected in ("replaced", "nothing", "nothing"):
        assert (await compact(history, compactor)).outcome == expected
    assert len(compactor.asked) == 1
    await history.clear_session()
    assert (await compact(history, compactor)).outcome == "nothing"


@pytest.mark.parametrize("more", [0, 50])
async def test_what_is_as_large_as_before_is_not_written(history: History, more: int) -> None:
    size = sum(len(repr(item)) for item in TALK)
    report = await compact(history, Fixed(items=[summary_message("x" * (size + more))]))
    assert (report.outcome, report.items, report.spent) == ("not_smaller", [], SPENT)
    assert await history.get_items() == TALK


async def test_a_conversation_over_several_compactions(history: History) -> None:
    model = Answers()
    compactor = SummaryCompactor(model, keep_last=2)
    for number in range(3):
        assert (await compact(history, compactor)).is_replaced
        await history.add_items([user(f"{number} " * 50), call(f"{number}"), output(f"{number}")])
    assert (await history.get_items())[0] == SUMMARY
    assert [SUMMARY in request.input for request in model.asked] == [False, True, True]


# --- compactors ----------------------------------------------------------------------------------


async def test_any_model_writes_a_summary(history: History) -> None:
    model = Answers()
    await history.add_items([{"type": "reasoning", "id": "r", "summary": []}, says("Really.")])
    await compact(history, SummaryCompactor(model, "Be short.", keep_last=0))
    (request,) = model.asked
    assert request.instructions == "Be short."
    assert list(request.input[:-1]) == [*TALK, says("Really.")]
    assert request.input[-1]["role"] == "user"
    assert await history.get_items() == [SUMMARY]


async def test_a_model_that_writes_no_summary_changes_nothing(history: History) -> None:
    with pytest.raises(CompactionFailed, match="no summary"):
        await compact(history, SummaryCompactor(Answers(text=""), keep_last=0))
    assert await history.get_items() == TALK


async def test_a_server_compacts_items_of_a_history_that_we_own(history: History) -> None:
    model = Answers()
    report = await compact(history, ResponsesCompactor(model))
    assert model.compacted == [(TALK, None)]
    stored = {"type": "compaction", "id": "c", "encrypted_content": "…"}  # without `created_by`
    assert report.items == await history.get_items() == [TALK[0], stored]


MODEL, OTHER = Answers(), Answers()
CHAIN = Chain("resp_1", len(TALK), TALK[-1], MODEL)
ALIEN = Chain("resp_1", len(TALK), TALK[-1], OTHER)


@pytest.mark.parametrize(
    ("mode", "chain", "sent"),
    [
        ("auto", CHAIN, ([], "resp_1")),
        ("auto", ALIEN, (TALK, None)),
        ("auto", None, (TALK, None)),
        ("input", CHAIN, (TALK, None)),
        ("previous_response", CHAIN, ([], "resp_1")),
        ("previous_response", ALIEN, ([], "resp_1")),
        ("previous_response", None, None),
        ("previous_response", Chain("resp_1", 3, TALK[-1]), None),
        ("previous_response", Chain("resp_1", 4, user("another")), None),
    ],
)
async def test_items_or_the_id_of_a_response_are_sent_and_never_both(
    history: History, mode: Any, chain: Chain | None, sent: Any
) -> None:
    model = MODEL
    model.compacted.clear()
    report = await compact(history, ResponsesCompactor(model, mode), chain=chain)
    assert model.compacted == ([sent] if sent else [])
    assert report.outcome == ("replaced" if sent else "waiting")


async def test_a_chain_that_lacks_an_item_of_somebody_else_is_not_used(history: History) -> None:
    model = MODEL
    model.compacted.clear()
    await history.add_items([user("from elsewhere")])
    await compact(history, ResponsesCompactor(model), chain=CHAIN)
    assert model.compacted == [([*TALK, user("from elsewhere")], None)]


async def test_items_that_stay_are_never_within_a_chain(history: History) -> None:
    model = MODEL
    model.compacted.clear()
    await compact(history, ResponsesCompactor(model), keep_last=1, chain=CHAIN)
    assert [previous for _, previous in model.compacted] == [None]


@pytest.mark.parametrize(
    "made", [[], [user("hi")], [SUMMARY, call("9")], [SUMMARY, output("9")]], ids=repr
)
async def test_what_stands_for_nothing_or_is_half_a_pair_is_refused(
    history: History, made: list[Item]
) -> None:
    with pytest.raises(CompactionFailed, match="a compactor made"):
        await compact(history, Fixed(items=made))
    assert await history.get_items() == TALK


# --- others, meanwhile ---------------------------------------------------------------------------


async def test_an_append_meanwhile_stays_behind_the_replacement(history: History) -> None:
    late = [user("late"), says("later")]
    report = await compact(history, Fixed(first=lambda: history.add_items(late)))
    assert report.is_replaced
    assert await history.get_items() == [SUMMARY, *late]


@pytest.mark.parametrize("keep_last", [0, 1, 3])
async def test_a_pop_meanwhile_changes_nothing_and_is_reported(
    history: History, keep_last: int
) -> None:
    await history.add_items([user("popped")])
    compactor = Fixed(first=history.pop_item)
    report = await compact(history, compactor, keep_last=keep_last)
    assert (report.outcome, report.items, report.spent) == ("conflict", [], SPENT)
    assert await history.get_items() == TALK
    compactor.first = None
    assert (await compact(history, compactor)).is_replaced


async def test_one_of_many_compactions_at_once_wins(history: History) -> None:
    gate = asyncio.Barrier(4)
    compactors = [Fixed(first=gate.wait) for _ in range(4)]
    reports = await asyncio.gather(*(compact(history, each) for each in compactors))
    assert sorted(report.outcome for report in reports) == ["conflict"] * 3 + ["replaced"]
    assert await history.get_items() == [SUMMARY]


async def test_a_history_that_is_cleared_meanwhile_stays_empty(history: History) -> None:
    assert (await compact(history, Fixed(first=history.clear_session))).outcome == "conflict"
    assert await history.get_items() == []


# --- failures and cancels ------------------------------------------------------------------------


async def test_a_compactor_that_fails_changes_nothing(history: History) -> None:
    async def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await compact(history, Fixed(first=fail))
    assert await history.get_items() == TALK


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("cut", ["before", "after"])
async def test_a_lost_connection_leaves_the_old_or_the_new_history(
    valkey_url: str, number: int, cut: str
) -> None:
    port = int(valkey_url.rpartition(":")[2].partition("/")[0])
    with CuttingProxy(port) as proxy:
        async with History("s", proxy.url, settings=own_settings(ONCE)) as history:
            await history.add_items(TALK)
            proxy.plan(["pass"] * number + [cut])
            try:
                report = await compact(history, Fixed())
            except StorageUnavailable:
                report = None
            proxy.plan([])
            left = await history.get_items()
            assert left in (TALK, [SUMMARY])
            if report is not None:
                assert left == [SUMMARY]


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("keep_last", [0, 1])
async def test_a_cancel_at_any_await_leaves_the_old_or_the_new_history(
    valkey_url: str, times: int, keep_last: int
) -> None:
    settings = own_settings()
    shared = AsyncConnections(valkey_url)
    history = History("s", shared, settings=settings)
    await history.info()  # connects
    outcomes = []
    for at in range(100):
        await history.clear_session()
        await history.add_items(TALK)
        is_compacted = asyncio.Event()

        async def work(done: asyncio.Event = is_compacted) -> None:
            await asyncio.sleep(0)
            done.set()

        compactor = Fixed(first=work)
        ended = await cancelled_at(
            lambda each=compactor: compact(history, each, keep_last=keep_last), at, times
        )
        left = await history.get_items()
        new = [SUMMARY, *TALK[4 - keep_last :]]
        assert left in (TALK, new)
        assert left == TALK or is_compacted.is_set()
        outcomes.append(left == TALK)
        if ended:
            break
        # Afterwards it can be compacted as ever.
        await compact(history, Fixed(), keep_last=keep_last)
        assert await history.get_items() == new
    assert ended
    assert outcomes[:2] == [True, True]  # in the read, and in the compactor
    assert not outcomes[-1]
    await shared.close()


# --- within a run --------------------------------------------------------------------------------


async def test_a_run_goes_on_whatever_becomes_of_a_compaction(history: History) -> None:
    reports: list[CompactionReport] = []
    compactor = Fixed()
    config = RunConfig(compaction=Compaction(compactor, threshold_items=4))
    assert config.compaction is not None
    of_run = CompactedHistory(config.compaction, config, history)

    async def if_due(*seen: Item) -> str | None:
        report = await of_run.if_due(View(list(seen)), reports.append)
        return report and report.outcome

    async def fail() -> None:
        raise ValueError("no")

    assert await if_due(*TALK[:3]) is None
    await history.add_items([user("more"), says("and more")])
    compactor.first = fail
    assert await if_due(*TALK) == "failed"
    assert await if_due(*TALK) is None  # not in every turn
    compactor.first = history.pop_item
    assert await if_due(*TALK, user("more")) == "conflict"
    compactor.first = None
    assert await if_due(*TALK, user("more")) == "replaced"
    assert await history.get_items() == [SUMMARY]
    assert await if_due(SUMMARY) is None
    assert [each.outcome for each in reports] == ["failed", "conflict", "replaced"]
    events = [dict([event]) for report in reports for event in report.events()]
    assert "ValueError: no" in events[0]["compaction"]["error"]
    assert events[2] == {"item": SUMMARY}


# --- large, limited and encrypted histories ------------------------------------------------------


async def test_a_history_of_many_chunks(valkey_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capsule_tasks.storage.history.core.CHUNK_ITEMS", 50)
    async with History("s", valkey_url, settings=own_settings()) as history:
        items = [user(f"{number} " + "x" * 100) for number in range(620)]
        await history.add_items(items)
        kept = [summary_message("so far"), *(user(str(number)) for number in range(120))]
        report = await compact(history, Fixed(items=kept), keep_last=10)
        assert report.replaced_items == 610
        assert await history.get_items() == [*kept, *items[610:]]


async def test_a_limited_history_is_compacted_as_a_whole(valkey_url: str) -> None:
    settings = own_settings()
    async with History(
        "s", valkey_url, settings=settings, session_settings={"limit": 2}
    ) as history:
        await history.add_items(TALK)
        assert len(await history.get_items()) == 2
        assert (await compact(history, Fixed())).replaced_items == 4
        assert await history.get_items(limit=99) == [SUMMARY]


async def test_an_encrypted_history_stays_encrypted(valkey_url: str) -> None:
    async with History("s", valkey_url, settings=own_settings()) as plain:
        sealed = encrypted(plain, [KEY])
        await sealed.add_items(TALK)
        assert (await compact(sealed, Fixed(), keep_last=1)).is_replaced
        assert await sealed.get_items() == [SUMMARY, TALK[-1]]
        stored = await plain.get_items()
        assert [item.keys() for item in stored] == [{"capsule_key", "sealed"}] * 2


async def test_unreadable_records_go_to_quarantine_and_no_others(valkey_url: str) -> None:
    async with History("s", valkey_url, settings=own_settings()) as plain:
        sealed = encrypted(plain, [KEY])
        await sealed.add_items(TALK)
        await plain.add_items([user("unreadable")])
        await sealed.add_items([user("two"), says("three")])
        await plain.add_items([user("unreadable, but not old")])
        await sealed.add_items([user("four")])
        assert (await compact(sealed, Fixed(), keep_last=2)).replaced_items == 5
        assert await sealed.get_items() == [SUMMARY, says("three"), user("four")]
        assert len(await plain.get_items()) == 4
        assert (await plain.info()).quarantined == 1


async def test_a_history_with_items_of_another_form_is_refused(valkey_url: str) -> None:
    class Shouting(History):
        async def get_items(self, limit: int | None = None) -> list[Any]:  # type: ignore[override]
            return [str(item).upper() for item in await super().get_items(limit)]

    async with Shouting("s", valkey_url, settings=own_settings()) as history:
        with pytest.raises(InvalidSetting, match="history"):
            await compact(history, Fixed())


# --- for callers that block ----------------------------------------------------------------------


def test_a_history_is_compacted_by_a_caller_that_blocks(valkey_url: str) -> None:
    with SyncHistory("s", valkey_url, settings=own_settings()) as history:
        history.add_items(TALK)
        report = compact_sync(history, SummaryCompactor(Answers(), keep_last=1))
        assert report.replaced_items == 3
        assert history.get_items() == [SUMMARY, TALK[-1]]
        assert compact_sync(history, Fixed(), keep_last=1).outcome == "nothing"

        async def pop() -> None:
            history.pop_item()

        history.add_items([user("more")])
        assert compact_sync(history, Fixed(first=pop)).outcome == "conflict"
        assert history.get_items() == [SUMMARY, TALK[-1]]
