"""Which child gets which work, and which events the listener gets. The sessions are fake."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter, deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from capsule_tasks.errors import UnknownInputRequest
from capsule_tasks.executions import lanes
from capsule_tasks.executions.calls import CodeCall
from capsule_tasks.protocol.messages import Code, Error, Output, TaskResult
from tests.sessions import HANG_S
from tests.unit.executions.dispatching import Work, ground, new_work


async def test_work_is_sent_in_order_of_arrival_and_each_right_after_the_end_before() -> None:
    async with ground() as here:
        one, two, three = (new_work(str(number)) for number in range(3))
        here.enqueue(one, two, three)
        child = here.child_of(one)
        child.ack("0")
        assert here.dispatcher.free_slots() == -2
        child.end("0")
        child.end("1")
        child.end("2")
        assert here.heard == [
            ("sent", one, "0"),
            ("started", one, 7.0),
            ("finished", one, TaskResult, None),
            ("sent", two, "1"),
            ("finished", two, TaskResult, None),
            ("sent", three, "2"),
            ("finished", three, TaskResult, None),
        ]
        assert here.dispatcher.free_slots() == 1
        assert here.dispatcher.sent_executions() == []


async def test_requests_of_a_child_go_to_the_listener_and_its_answer_goes_back() -> None:
    async with ground() as here:
        work = new_work("a")
        here.enqueue(work)
        output = Output(execution_id="a", stream="stdout", data="x")
        assert here.child_of(work).consumers["a"](output) is False
        assert here.heard[-1] == ("said", work, output)
        work.resume_output()
        assert here.child_of(work).done == [("read on", "a")]


async def test_blocking_work_that_is_not_acknowledged_counts_as_started_a_moment_later() -> None:
    """A coroutine does not: others may keep the loop of its child."""
    async with ground(1, 1) as here:
        coroutine, work = new_work("c", is_async=True), new_work("a")
        here.enqueue(coroutine, work)
        async with asyncio.timeout(HANG_S):
            while here.listener.of(work) != ["sent", "started"]:
                here.listener.news.clear()
                await here.listener.news.wait()
        here.child_of(work).ack("a")
        assert here.listener.of(work) == ["sent", "started", "started"]
        assert here.listener.of(coroutine) == ["sent"]


async def test_work_that_its_child_refuses_is_the_first_to_be_sent_elsewhere() -> None:
    async with ground(2) as here:
        first, *_ = here.children()
        first.refuses = True
        one, two = new_work("1"), new_work("2")
        here.enqueue(one, two)
        assert [what[:2] for what in here.heard] == [("sent", one), ("refused", one), ("sent", one)]
        assert here.child_of(one) is not first
        await here.quiescent()
        assert here.listener.of(two) == ["sent"]  # by the successor of the first
        assert first not in here.children()


async def test_a_child_that_refuses_keeps_what_it_has() -> None:
    async with ground(0, 1) as here:
        one, two = new_work("1", is_async=True), new_work("2", is_async=True)
        here.enqueue(one)
        condemned = here.child_of(one)
        condemned.refuses = True
        here.enqueue(two)
        assert here.listener.of(two) == ["sent", "refused"]
        await here.quiescent()
        assert here.child_of(two) is not condemned
        assert here.child_of(one) is condemned
        condemned.end("1")
        await here.quiescent()
        assert here.children() == [here.child_of(two)]
        assert here.dispatcher.lanes["async"].pool.info().lost_total == 0


async def test_a_child_whose_end_is_not_yet_known_is_counted_as_lost_once() -> None:
    async with ground() as here:
        (child,) = here.children()
        child.is_alive = False
        work = new_work("1")
        here.enqueue(work)
        child.is_alive = True
        child.die(-9)
        await here.quiescent()
        assert here.listener.of(work) == ["sent", "refused", "sent"]
        assert here.dispatcher.lanes["blocking"].pool.info().lost_total == 1


async def test_a_message_that_is_delivered_twice_has_two_ids_in_its_child() -> None:
    async with ground(0, 1) as here:
        works = [new_work("same", is_async=True) for _ in range(3)]
        here.enqueue(*works)
        assert [what[2] for what in here.heard] == ["same", "same~", "same~~"]
        here.child_of(works[1]).end("same~")
        assert here.listener.of(works[1]) == ["sent", "finished"]
        assert here.listener.of(works[0]) == here.listener.of(works[2]) == ["sent"]


async def test_work_that_cannot_be_sent_is_over_at_once_and_holds_up_nothing() -> None:
    async with ground() as here:
        (child,) = here.children()
        child.ends_at_once = True
        works = [new_work(str(number)) for number in range(3)]
        here.enqueue(*works)
        assert [here.listener.of(work) for work in works] == [["sent", "finished"]] * 3


async def test_work_that_dies_with_its_child_finishes_with_its_exit_status() -> None:
    async with ground() as here:
        one, two = new_work("1"), new_work("2")
        here.enqueue(one, two)
        dead = here.child_of(one)
        dead.die(-11)
        assert here.listener.of(one) == ["sent", "finished"]
        assert here.heard[1] == ("finished", one, Error, -11)
        await here.quiescent()
        assert here.listener.of(two) == ["sent"]
        assert here.child_of(two) is not dead
        assert here.dispatcher.lanes["blocking"].pool.info().lost_total == 1


async def test_a_task_that_tried_to_end_its_process_is_the_last_of_its_child() -> None:
    async with ground() as here:
        one, two = new_work("1"), new_work("2")
        here.enqueue(one, two)
        child = here.child_of(one)
        child.end("1", TaskResult(execution_id="1", escaped_tracer=True))
        assert here.listener.of(two) == []
        await here.quiescent()
        assert here.child_of(two) is not child


async def test_work_in_the_queue_can_be_taken_out_and_work_that_was_sent_cannot() -> None:
    async with ground() as here:
        one, two, three = (new_work(str(number)) for number in range(3))
        here.enqueue(one, two, three)
        assert not here.dispatcher.remove(one)
        assert here.dispatcher.remove(two)
        assert not here.dispatcher.remove(two)
        assert here.dispatcher.remove(three)
        assert here.dispatcher.sent_executions() == [one]


async def test_nothing_can_be_done_to_work_that_no_child_has() -> None:
    async with ground(0) as here:
        work, dispatcher = new_work("1"), here.dispatcher
        here.enqueue(work)
        dispatcher.signal(work, signal.SIGTERM, "a test")
        dispatcher.signal(work, signal.SIGKILL, "a test")
        dispatcher.cancel(work, 1.0)
        work.resume_output()
        await dispatcher.end_input(work, "question")
        assert not dispatcher.soft_limit(work)
        assert await dispatcher.interrupt(work) == "not_running"
        assert await dispatcher.stack(work) is None
        with pytest.raises(UnknownInputRequest):
            await dispatcher.respond(work, "question", "answer")
        assert here.heard == []


async def test_a_child_that_survives_a_signal_gets_nothing_new() -> None:
    async with ground() as here:
        one, two = new_work("1"), new_work("2")
        here.enqueue(one, two)
        child = here.child_of(one)
        here.dispatcher.signal(one, signal.SIGTERM, "a test")
        assert child.done == [signal.SIGTERM]
        child.end("1")
        assert here.listener.of(two) == []
        here.dispatcher.signal(
            one, signal.SIGKILL, "a test"
        )  # too late, and no matter to whom the child belongs now
        await here.quiescent()
        assert here.listener.of(two) == ["sent"]


async def test_a_child_that_is_killed_was_not_lost() -> None:
    async with ground(2) as here:
        one, dispatcher = new_work("1"), here.dispatcher
        here.enqueue(one)
        busy = here.child_of(one)
        dispatcher.signal(one, signal.SIGKILL, "a test")
        await here.quiescent()
        assert not busy.is_alive
        assert len(here.children()) == 2
        info = dispatcher.lanes["blocking"].pool.info()
        assert (info.lost_total, info.starts_total) == (0, 3)


async def test_a_lane_that_shrinks_lets_busy_children_finish() -> None:
    async with ground(2) as here:
        one, two, three = (new_work(str(number)) for number in range(3))
        here.enqueue(one, two)
        here.dispatcher.resize("blocking", 1)
        here.enqueue(three)
        assert here.dispatcher.free_slots() == -2
        children = {work: here.child_of(work) for work in (one, two)}
        for work, child in children.items():
            child.end(work.call.task_id)
        await here.quiescent()
        assert here.listener.of(three) == ["sent"]
        assert len(here.children()) == 1


async def test_children_that_are_all_replaced_finish_their_tasks() -> None:
    async with ground(2) as here:
        one, two = new_work("1"), new_work("2")
        here.enqueue(one)
        old = set(here.children())
        here.dispatcher.replace_all("new code")
        here.enqueue(two)
        await here.quiescent()
        assert here.child_of(two) not in old
        here.child_of(one).end("1")
        await here.quiescent()
        assert not old & set(here.children())
        assert len(here.children()) == 2


async def test_coroutines_wait_where_too_many_children_finish_their_last() -> None:
    async with ground(0, 1, max_uses=1) as here:
        lane = here.dispatcher.lanes["async"]
        works = [new_work(str(number), is_async=True) for number in range(11)]
        for work in works:
            assert not lane.is_stuck
            here.enqueue(work)
            await here.quiescent()
        assert here.listener.of(works[-1]) == []
        assert lane.is_stuck
        here.child_of(works[0]).end("0")
        await here.quiescent()
        assert here.listener.of(works[-1]) == ["sent"]


async def test_a_listener_that_fails_costs_no_child_its_place() -> None:
    async with ground() as here:
        one, two = new_work("1"), new_work("2")
        here.enqueue(one, two)
        here.listener.fails = True
        with pytest.raises(ZeroDivisionError):
            here.child_of(one).end("1")
        assert here.listener.of(two) == ["sent"]


async def test_work_of_a_process_is_found_by_its_number() -> None:
    async with ground() as here:
        work = new_work("1")
        assert here.dispatcher.execution_of(os.getpid()) is None
        here.enqueue(work)
        assert here.dispatcher.execution_of(os.getpid()) is work
        assert here.dispatcher.execution_of(1) is None


def test_a_child_is_believed_to_start_within_a_twentieth_of_a_second() -> None:
    assert lanes.ASSUME_STARTED_AFTER_S == 0.05


EVENTS = st.sampled_from(
    ["enqueue", "enqueue", "end", "end", "die", "refuse", "signal", "kill", "resize", "replace"]
)


@given(
    events=st.lists(st.tuples(EVENTS, st.booleans(), st.integers(0, 50)), max_size=40),
    max_uses=st.sampled_from([None, 2]),
)
@hypothesis_settings(max_examples=150, deadline=None)
def test_in_any_order_of_events_each_work_is_sent_in_turn_and_finishes_once(
    events: list[tuple[str, bool, int]], max_uses: int | None
) -> None:
    asyncio.run(happen(events, max_uses))


async def happen(events: list[tuple[str, bool, int]], max_uses: int | None) -> None:
    async with ground(2, 1, max_uses=max_uses, breaker_failures=1000) as here:
        works: list[Work] = []
        for number, (event, is_async, choice) in enumerate(events):
            if event == "enqueue":
                works.append(new_work(str(number), is_async=is_async))
                here.enqueue(works[-1])
            elif event == "resize":
                here.dispatcher.resize("async" if is_async else "blocking", choice % 3)
            elif event == "replace":
                here.dispatcher.replace_all("a test")
            elif sent_executions := here.dispatcher.sent_executions():
                happen_to(here, sent_executions[choice % len(sent_executions)], event)
            if choice % 2:
                await here.quiescent()
            check(here, works)
        here.dispatcher.resize("blocking", 1)
        here.dispatcher.resize("async", 1)
        await here.quiescent()
        while sent_executions := here.dispatcher.sent_executions():
            for work in sent_executions:
                here.child_of(work).end(work.call.task_id)
            await here.quiescent()
            check(here, works)
        counts = Counter((what[0], what[1]) for what in here.heard)
        for work in works:
            assert counts["finished", work] == 1
            assert counts["started", work] <= 1
            assert counts["sent", work] == 1 + counts["refused", work]


def happen_to(here: Any, work: Work, event: str) -> None:
    child = here.child_of(work)
    if event == "end":
        child.end(work.call.task_id)
    elif event == "die":
        child.die(-9)
    elif event == "refuse":
        child.refuses = True
    elif event == "kill":
        here.dispatcher.signal(work, signal.SIGKILL, "a test")
    elif not work.life.origin.is_async:
        here.dispatcher.signal(work, signal.SIGTERM, "a test")


def check(here: Any, works: list[Work]) -> None:
    """Nothing is lost, nothing overtaken, and no child has more than it takes."""
    for kind, capacity in (("blocking", 1), ("async", 3)):
        mine = [work for work in works if work.life.origin.is_async == (kind == "async")]
        never_sent = [work for work in mine if not here.listener.of(work)]
        refused = [work for work in mine if here.listener.of(work)[-1:] == ["refused"]]
        assert here.dispatcher.lanes[kind].waiting == deque(refused + never_sent)
        for child in here.dispatcher.lanes[kind].children.values():
            assert len(child.sent) == child.slot.load <= capacity
    sent = {work for work in works if here.listener.of(work)[-1:] in (["sent"], ["started"])}
    assert set(here.dispatcher.sent_executions()) == sent


async def test_source_code_is_sent_with_its_time_and_without_a_task() -> None:
    async with ground() as here:
        work = new_work("a")
        work.call = CodeCall(name="capsule.execute", task_id="a", source="6 * 7", timeout_s=3.0)
        here.enqueue(work)
        assert here.child_of(work).payloads == [(Code(source="6 * 7"), 3.0)]
