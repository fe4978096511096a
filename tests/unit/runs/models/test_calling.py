"""One model call: its time limit, its retries, and streams that are begun again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from capsule_tasks.errors import InvalidSetting, ModelFailed
from capsule_tasks.runs.models.calling import call_model, pause_after
from capsule_tasks.runs.models.model import (
    ModelDelta,
    ModelReply,
    ModelRequest,
    ModelRetries,
    ModelSettings,
)
from capsule_tasks.runs.records import Spent
from capsule_tasks.testing.models import ScriptedModel, breaks_off

BUSY = ModelFailed("m", "it is busy", is_retryable=True)


def request(**settings: Any) -> ModelRequest:
    return ModelRequest(input=[], settings=ModelSettings(**settings))


def text_of(reply: ModelReply) -> str:
    (item,) = reply.items
    text: str = item["content"][0]["text"]
    return text


class Pauses:
    """Keeps the pauses that were asked for, and takes none."""

    def __init__(self) -> None:
        self.taken: list[float] = []

    async def __call__(self, pause_s: float) -> None:
        self.taken.append(pause_s)


class Watcher:
    """The events that a watcher of a streamed call sees, in order."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def delta(self, delta: ModelDelta) -> None:
        self.seen.append(delta.text)

    def discarded(self, failure: ModelFailed) -> None:
        self.seen.append(f"discarded: {failure.why}")


# --- retries -------------------------------------------------------------------------------------


async def test_a_call_that_may_succeed_later_is_made_again_after_growing_pauses() -> None:
    model, pauses = ScriptedModel([BUSY, BUSY, "hello"]), Pauses()
    retries = ModelRetries(pause_s=1)
    assert text_of(await call_model(model, request(retries=retries), sleep=pauses)) == "hello"
    first_s, second_s = pauses.taken
    assert 0.5 <= first_s <= 1
    assert 1 <= second_s <= 2
    assert len(model.requests) == 3


async def test_without_settings_there_are_three_attempts_and_the_last_error_counts() -> None:
    last = ModelFailed("m", "it is still busy", is_retryable=True)
    model, pauses = ScriptedModel([BUSY, BUSY, last, "hello"]), Pauses()
    with pytest.raises(ModelFailed, match="still busy"):
        await call_model(model, request(), sleep=pauses)
    assert len(pauses.taken) == 2


@pytest.mark.parametrize("error", [ModelFailed("m", "no such model"), ValueError("odd")])
async def test_other_failures_are_final(error: Exception) -> None:
    model, pauses = ScriptedModel([error, "hello"]), Pauses()
    with pytest.raises(ModelFailed, match=r"no such model|ScriptedModel.*ValueError: odd"):
        await call_model(model, request(), sleep=pauses)
    assert pauses.taken == []


def test_the_pause_that_a_server_asks_for_is_kept_or_the_call_is_given_up() -> None:
    retries = ModelRetries(attempts=2, pause_s=0.1, max_pause_s=10)

    def after(asked_s: float | None, attempt: int = 1) -> float | None:
        failure = ModelFailed("m", "busy", is_retryable=True, retry_after_s=asked_s)
        return pause_after(failure, attempt, retries)

    assert after(9.5) == 9.5
    assert after(10.5) is None
    assert after(9.5, attempt=2) is None
    assert 0.05 <= (after(0.01) or 0) <= 0.1
    assert 0.05 <= (after(None) or 0) <= 0.1


def test_pauses_never_grow_over_their_limit() -> None:
    retries = ModelRetries(attempts=1000, pause_s=1, max_pause_s=3)
    pauses = [pause_after(BUSY, attempt, retries) or 0 for attempt in range(1, 900)]
    assert max(pauses) <= 3


async def test_a_cancel_ends_the_pause_at_once() -> None:
    pausing, began_at = asyncio.Event(), time.monotonic()

    async def sleep(pause_s: float) -> None:
        pausing.set()
        await asyncio.sleep(pause_s)

    retries = ModelRetries(pause_s=1000, max_pause_s=1000)
    model = ScriptedModel([BUSY])
    call = asyncio.create_task(call_model(model, request(retries=retries), sleep=sleep))
    await pausing.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert time.monotonic() - began_at < 100


# --- streams -------------------------------------------------------------------------------------


async def test_a_watcher_is_told_that_the_deltas_of_a_failed_attempt_do_not_count() -> None:
    broken = breaks_off("hel", ModelFailed("m", "cut", is_retryable=True))
    model, watcher = ScriptedModel([broken, BUSY, "hello"]), Watcher()
    reply = await call_model(
        model, request(), on_delta=watcher.delta, on_discarded=watcher.discarded, sleep=Pauses()
    )
    assert text_of(reply) == "hello"
    assert watcher.seen == ["hel", "discarded: cut", "hello"]


async def test_the_last_failure_of_a_stream_is_raised_and_not_called_discarded() -> None:
    model, watcher = ScriptedModel([breaks_off("hel", ModelFailed("m", "cut"))]), Watcher()
    with pytest.raises(ModelFailed, match="cut"):
        await call_model(model, request(), on_delta=watcher.delta, on_discarded=watcher.discarded)
    assert watcher.seen == ["hel"]


class Streaming(ScriptedModel):
    """A stream of one delta that then does as the test says."""

    name = "streaming"

    def __init__(self, ending: Any) -> None:
        super().__init__()
        self._ending = ending
        self.is_closed = False

    async def stream_response(self, request: Any) -> AsyncIterator[ModelDelta | ModelReply]:
        try:
            yield ModelDelta(kind="text", text="hel")
            await self._ending()
        finally:
            self.is_closed = True


async def test_a_stream_without_a_reply_is_a_failure_that_names_the_model() -> None:
    async def end() -> None:
        return

    retries = ModelRetries(attempts=1)
    with pytest.raises(ModelFailed, match=r"'streaming' .* ended without a reply") as raised:
        await call_model(Streaming(end), request(retries=retries), on_delta=Watcher().delta)
    assert raised.value.is_retryable


async def test_a_cancelled_call_closes_its_stream() -> None:
    streaming, forever = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        streaming.set()
        await forever.wait()

    model = Streaming(wait)
    call = asyncio.create_task(call_model(model, request(), on_delta=Watcher().delta))
    await streaming.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert model.is_closed


# --- time ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_attempt_that_takes_too_long_is_ended_and_made_again(is_streamed: bool) -> None:
    forever = asyncio.Event()

    async def hang(_: ModelRequest) -> str:
        await forever.wait()
        return "late"

    settings = {"timeout_s": 0.01, "retries": ModelRetries(attempts=2)}
    on_delta = Watcher().delta if is_streamed else None
    model, pauses = ScriptedModel([hang, "hello"]), Pauses()
    reply = await call_model(model, request(**settings), on_delta=on_delta, sleep=pauses)
    assert text_of(reply) == "hello"
    model = ScriptedModel([hang, hang])
    with pytest.raises(ModelFailed, match=r"longer than 0.01 s"):
        await call_model(model, request(**settings), on_delta=on_delta, sleep=pauses)


async def test_a_time_limit_of_the_model_itself_is_a_failure_of_the_model() -> None:
    async def give_up(_: ModelRequest) -> str:
        raise TimeoutError("mine")

    with pytest.raises(ModelFailed, match="TimeoutError: mine"):
        await call_model(ScriptedModel([give_up]), request(timeout_s=60))


async def test_a_model_that_cancels_itself_has_failed_and_the_caller_goes_on() -> None:
    async def cancel(_: ModelRequest) -> str:
        raise asyncio.CancelledError

    with pytest.raises(ModelFailed, match="cancelled by itself"):
        await call_model(ScriptedModel([cancel]), request())


async def test_the_reply_has_the_time_that_it_took_unless_the_model_has_measured_it() -> None:
    async def slow(_: ModelRequest) -> str:
        await asyncio.sleep(0.005)
        return "hello"

    reply = await call_model(ScriptedModel([slow]), request())
    assert reply.spent.time_ms >= 5
    measured = ModelReply(items=[], spent=Spent(requests=1, time_ms=7))
    assert await call_model(ScriptedModel([measured]), request()) is measured


# --- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ModelRetries(attempts=0), "ModelRetries.attempts = 0: must be 1 or more"),
        (lambda: ModelRetries(pause_s=-1), "ModelRetries.pause_s = -1"),
        (lambda: ModelSettings(timeout_s=0), "ModelSettings.timeout_s = 0"),
    ],
)
def test_settings_outside_their_limits_are_refused(make: Any, message: str) -> None:
    with pytest.raises(InvalidSetting, match=message):
        make()
