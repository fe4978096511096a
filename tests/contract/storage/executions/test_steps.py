"""A step of a task is made at most once, whatever is delivered again."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from billiard.exceptions import SoftTimeLimitExceeded
from celery import Celery, current_app

import capsule_tasks
from capsule_tasks.client import Steps
from capsule_tasks.errors import (
    CallChanged,
    EffectUncertain,
    InvalidId,
    InvalidSetting,
    OutputNotStorable,
    StepMisused,
)
from capsule_tasks.settings import StepSettings
from capsule_tasks.storage import AsyncConnections, SyncConnections
from capsule_tasks.storage.scripts import Call
from capsule_tasks.testing import eager
from capsule_tasks.testing.steps import StepsInMemory
from tests.servers import fresh_prefix

STORES = {
    "redis62": "redis62_url",
    "valkey": "valkey_url",
    "cluster": "cluster_url",
    "eager": None,
}
OUTPUTS = [
    None,
    7,
    "text",
    b"\x00\xff",
    [1, (2, 3)],
    {"a": {1, 2}},
    datetime(2026, 1, 1, tzinfo=UTC),
]


class Card:
    """An effect that counts how often it happened."""

    def __init__(self, outcome: Any = "charged", error: BaseException | None = None) -> None:
        self.charges: list[Any] = []
        self._outcome = outcome
        self._error = error

    def charge(self, *args: Any, **kwargs: Any) -> Any:
        self.charges.append((args, kwargs))
        if self._error is not None:
            raise self._error
        return self._outcome

    async def charge_later(self, *args: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(0)
        return self.charge(*args, **kwargs)


class Task:
    """One task; each delivery is another object, as in another process."""

    def __init__(self, store: Any, face: str) -> None:
        self._store = store
        self._face = face
        self._settings = StepSettings(prefix=fresh_prefix(), max_output_bytes=1000)

    async def deliver(self, name: str, card: Card, *args: Any, **options: Any) -> Any:
        steps = Steps(self._store, execution_id="task-1", settings=self._settings)
        if self._face == "async":
            return await steps.step(name, card.charge_later, *args, **options)
        return steps.step(name, card.charge, *args, **options)


@pytest.fixture(params=[(store, face) for store in STORES for face in ("async", "sync")],
                ids="-".join)  # fmt: skip
async def task(request: pytest.FixtureRequest) -> AsyncIterator[Task]:
    store_name, face = request.param
    fixture = STORES[store_name]
    url = request.getfixturevalue(fixture) if fixture else None
    if url is None:
        yield Task(StepsInMemory(), face)
    elif face == "async":
        store = AsyncConnections(url)
        yield Task(store, face)
        await store.close()
    else:
        blocking = SyncConnections(url)
        yield Task(blocking, face)
        blocking.close_blocking()


@pytest.mark.parametrize("output", OUTPUTS, ids=lambda each: type(each).__name__)
async def test_a_second_delivery_gets_the_recorded_output(task: Task, output: Any) -> None:
    card = Card(output)
    for _ in range(3):
        assert await task.deliver("charge", card, 42, currency="EUR") == output
    assert card.charges == [((42,), {"currency": "EUR"})]


async def test_steps_of_other_names_are_other_steps(task: Task) -> None:
    card = Card()
    await task.deliver("charge", card, 1)
    await task.deliver("charge again", card, 1)
    assert len(card.charges) == 2


async def test_a_step_that_raised_is_uncertain_until_a_person_decides(task: Task) -> None:
    card = Card(error=ConnectionError("secret of the server"))
    with pytest.raises(ConnectionError):
        await task.deliver("charge", card, 1)
    with pytest.raises(EffectUncertain, match="it raised ConnectionError") as caught:
        await task.deliver("charge", card, 1)
    assert "secret" not in str(caught.value)
    assert len(card.charges) == 1
    repaired = Card("done")
    assert await task.deliver("charge", repaired, 1, retry=True) == "done"
    assert await task.deliver("charge", card, 1) == "done"


async def test_a_step_whose_error_rules_out_an_effect_may_run_again(task: Task) -> None:
    card = Card(error=PermissionError())
    for _ in range(2):
        with pytest.raises(PermissionError):
            await task.deliver("charge", card, 1, no_effect=(PermissionError,))
    assert len(card.charges) == 2
    assert await task.deliver("charge", Card("done"), 1) == "done"


async def test_a_misuse_inside_a_step_leaves_the_step_uncertain(task: Task) -> None:
    """The function may have had its effect before it misused another step."""
    card = Card(error=StepMisused("receipt", "its name comes first"))
    with pytest.raises(StepMisused, match="receipt"):
        await task.deliver("charge", card, 1)
    with pytest.raises(EffectUncertain, match="it raised StepMisused"):
        await task.deliver("charge", card, 1)
    assert len(card.charges) == 1


async def test_other_arguments_under_a_used_name_make_nothing(task: Task) -> None:
    card = Card()
    await task.deliver("charge", card, 1)
    with pytest.raises(CallChanged, match="name of its own"):
        await task.deliver("charge", card, 2)
    assert len(card.charges) == 1


async def test_arguments_are_compared_by_values_that_are_the_same_in_every_process(
    task: Task,
) -> None:
    card = Card()
    await task.deliver("charge", card, {"b": 1, "a": [1]}, object(), {3})
    await task.deliver("charge", card, {"a": [1], "b": 1}, object(), {4})
    assert len(card.charges) == 1


@pytest.mark.parametrize(
    ("first", "other"),
    [
        (Decimal("1.10"), Decimal("1.2")),
        (b"a", b"b"),
        (datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 2, tzinfo=UTC)),
        ({1: "a", 2: "b"}, {1: "b", 2: "a"}),
    ],
)
async def test_arguments_beyond_json_are_compared_where_they_have_one_spelling(
    first: Any, other: Any
) -> None:
    task, card = Task(StepsInMemory(), "sync"), Card()
    await task.deliver("charge", card, first)
    again = dict(reversed(first.items())) if isinstance(first, dict) else first
    await task.deliver("charge", card, again)
    with pytest.raises(CallChanged):
        await task.deliver("charge", card, other)
    assert len(card.charges) == 1


async def test_an_output_that_cannot_be_recorded_is_an_error_now_and_later(task: Task) -> None:
    card = Card(object())
    for _ in range(2):
        with pytest.raises(OutputNotStorable, match="of type object"):
            await task.deliver("charge", card, 1)
    large = Card("x" * 2000)
    for _ in range(2):
        with pytest.raises(OutputNotStorable, match="over the limit of 1000"):
            await task.deliver("large", large, 1)
    assert len(card.charges) == len(large.charges) == 1


async def test_a_step_in_progress_is_not_made_by_another_delivery(task: Task) -> None:
    card = Card()

    class Nested(Card):
        def charge(self, *args: Any, **kwargs: Any) -> Any:
            steps = Steps(StepsInMemory(), execution_id="other")
            assert steps.step("own", lambda: 1) == 1
            return super().charge(*args)

        async def charge_later(self, *args: Any, **kwargs: Any) -> Any:
            with pytest.raises(EffectUncertain, match="still at it"):
                await task.deliver("charge", card, 1)
            return self.charge(*args)

    outer = Nested()
    assert await task.deliver("charge", outer, 1) == "charged"
    assert (len(outer.charges), len(card.charges)) == (1, 0)


async def test_an_invalid_step_is_refused(task: Task) -> None:
    card = Card()
    with pytest.raises(StepMisused, match="its name comes first"):
        await task.deliver(card.charge, card)  # type: ignore[arg-type]
    with pytest.raises(InvalidId, match="step name"):
        await task.deliver("", card)
    with pytest.raises(StepMisused, match="function and its arguments"):
        Steps(StepsInMemory(), execution_id="t").step("charge", "charge")  # type: ignore[arg-type]
    assert card.charges == []


def test_steps_of_eager_tasks_are_stored_in_memory_without_redis_or_a_worker() -> None:
    app, other = (Celery(name, broker="memory://", set_as_current=False) for name in "ab")
    other.conf.capsule_redis_url = "redis://localhost:1/0"
    before = current_app._get_current_object()
    other.set_current()
    card = Card()

    @app.task(shared=False)
    def pay(amount: int) -> Any:
        return capsule_tasks.step("charge", card.charge, amount)

    with eager(app):
        for _ in range(2):
            assert pay.apply(args=[5], task_id="task-1").get() == "charged"
        assert pay.delay(5).get() == "charged"
    assert len(card.charges) == 2
    with pytest.raises(InvalidSetting, match="capsule_redis_url"):
        pay.apply(args=[5], task_id="task-1").get()
    before.set_current()
    for each in (app, other):
        each.close()


def test_without_a_current_task_the_execution_must_be_given() -> None:
    with pytest.raises(StepMisused, match="give an execution_id"):
        capsule_tasks.step("charge", print)


@pytest.mark.parametrize(
    "policy",
    [
        {"retry": "no"},
        {"retry": 1},
        {"no_effect": [ValueError]},
        {"no_effect": ValueError},
        {"no_effect": ("ValueError",)},
    ],
)
def test_an_invalid_policy_is_refused_before_the_call(
    policy: dict[str, Any],
) -> None:
    steps, card = Steps(StepsInMemory(), execution_id="t"), Card()
    with pytest.raises(StepMisused, match=next(iter(policy))):
        steps.step("charge", card.charge, **policy)
    assert not card.charges
    assert steps.step("charge", card.charge) == "charged"


def test_a_function_that_returns_an_awaitable_is_refused_before_it_runs() -> None:
    card = Card()
    steps = Steps(StepsInMemory(), execution_id="t")

    def later() -> Any:
        return card.charge_later()

    with pytest.raises(StepMisused, match="pass the coroutine function itself"):
        steps.step("charge", later)
    assert card.charges == []
    assert steps.step("charge", card.charge) == "charged"


async def test_steps_can_be_kept_at_a_url_by_both_kinds_of_functions(valkey_url: str) -> None:
    settings, card = StepSettings(prefix=fresh_prefix()), Card()
    steps = Steps(valkey_url, execution_id="t", settings=settings)
    assert steps.step("charge", card.charge) == "charged"
    assert await steps.step("charge", card.charge_later) == "charged"
    assert len(card.charges) == 1


def test_a_generator_is_refused_because_a_call_runs_none_of_its_code() -> None:
    steps, card = Steps(StepsInMemory(), execution_id="t"), Card()

    def charges(_: int = 0) -> Any:
        yield card.charge()

    async def later() -> Any:
        yield card.charge()

    for each in (charges, functools.partial(charges, 1), later):
        with pytest.raises(StepMisused, match="a generator does nothing"):
            steps.step("charge", each)
    assert steps.step("charge", card.charge) == "charged"


def test_an_empty_execution_id_is_refused_and_is_not_that_of_the_task() -> None:
    with pytest.raises(InvalidId, match="must not be empty"):
        Steps(StepsInMemory(), execution_id="").step("charge", print)


async def test_partials_and_callable_objects_may_be_coroutine_functions() -> None:
    card = Card()
    steps = Steps(StepsInMemory(), execution_id="t")

    class Later:
        async def __call__(self, amount: int) -> str:
            return f"paid {amount}"

    assert await steps.step("one", functools.partial(card.charge_later, 1)) == "charged"
    assert await steps.step("two", Later(), 7) == "paid 7"


async def test_a_cancel_while_the_output_is_recorded_does_not_lose_it(valkey_url: str) -> None:
    store = AsyncConnections(valkey_url)
    steps = Steps(store, execution_id="t", settings=StepSettings(prefix=fresh_prefix()))
    card = Card()
    made = asyncio.Event()

    async def charge() -> Any:
        made.set()
        return card.charge()

    task = asyncio.ensure_future(steps.step("charge", charge))
    await made.wait()
    task.cancel()
    await asyncio.wait({task})
    assert await steps.step("charge", charge) == "charged"
    assert len(card.charges) == 1
    await store.close()


async def test_a_cancel_before_the_step_leaves_it_undone(valkey_url: str) -> None:
    """Cancelled at every await before the function: the next delivery makes it."""
    store = AsyncConnections(valkey_url)
    for turns in range(12):
        settings = StepSettings(prefix=fresh_prefix())
        steps = Steps(store, execution_id="t", settings=settings)
        card = Card()

        async def charge(card: Card = card) -> Any:
            return card.charge()

        task = asyncio.ensure_future(steps.step("charge", charge))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        if not card.charges:
            assert await steps.step("charge", charge) == "charged"
        assert len(card.charges) == 1
    await store.close()


@pytest.mark.parametrize("error", [SoftTimeLimitExceeded, KeyboardInterrupt])
def test_a_time_limit_while_the_output_is_recorded_does_not_lose_it(
    valkey_url: str, error: type[BaseException]
) -> None:
    card = Card()
    interrupted: list[str] = []

    class Interrupted(SyncConnections):
        """As a signal does to a blocking call: once, before the end of the step is sent."""

        def run_blocking(self, call: Call) -> Any:
            if call.script.name == "executions/step_end" and not interrupted:
                interrupted.append(call.script.name)
                raise error
            return super().run_blocking(call)

    store = Interrupted(valkey_url)
    steps = Steps(store, execution_id="t", settings=StepSettings(prefix=fresh_prefix()))
    with pytest.raises(error):
        steps.step("charge", card.charge)
    assert steps.step("charge", card.charge) == "charged"
    assert len(card.charges) == 1
    store.close_blocking()
