"""Scripted models give what a test wrote down, streamed and whole, and say when it is used up."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from capsule_tasks.errors import ModelFailed
from capsule_tasks.runs.agents.agent import Agent
from capsule_tasks.runs.agents.handoffs import Handoff
from capsule_tasks.runs.models.model import (
    Model,
    ModelDelta,
    ModelReply,
    ModelRequest,
    ToolSpec,
)
from capsule_tasks.runs.records import Item
from capsule_tasks.testing.models import (
    ScriptedModel,
    StatelessModel,
    breaks_off,
    calls,
    hands_over,
    reasons,
    refuses,
    says,
)


def asked(*items: Item, **fields: Any) -> ModelRequest:
    return ModelRequest(input=list(items), **fields)


def user(text: str) -> Item:
    return {"role": "user", "content": text}


def output(call_id: str) -> Item:
    return {"type": "function_call_output", "call_id": call_id, "output": "done"}


def without_ids(items: list[Item]) -> list[Item]:
    return [{name: item[name] for name in item if name != "id"} for item in items]


async def replies_of(model: Model, times: int, *items: Item) -> list[list[Item]]:
    return [(await model.get_response(asked(*items))).items for _ in range(times)]


async def streamed(model: Model, request: ModelRequest) -> list[ModelDelta | ModelReply]:
    return [part async for part in model.stream_response(request)]


# --- what is scripted ----------------------------------------------------------------------------


async def test_replies_are_texts_items_lists_of_both_and_functions_of_the_request() -> None:
    async def later(request: ModelRequest) -> str:
        return f"{len(request.input)} items"

    script = ["hello", says("there"), ["now", calls("pay", {"euros": 5}, "c1")], later]
    got = await replies_of(ScriptedModel(script), 4, user("hi"))
    assert [without_ids(items) for items in got] == [
        [says("hello")],
        [says("there")],
        [says("now"), calls("pay", '{"euros": 5}', "c1")],
        [says("1 items")],
    ]


async def test_a_whole_reply_is_given_as_it_is_and_an_exception_is_raised() -> None:
    reply = ModelReply(items=[], response_id="r1")
    failed = ModelFailed("m", "it is busy", is_retryable=True)
    model = ScriptedModel([reply, failed, "again"])
    assert await model.get_response(asked()) is reply
    with pytest.raises(ModelFailed) as raised:
        await model.get_response(asked())
    assert raised.value is failed
    assert (await model.get_response(asked())).items[0]["type"] == "message"


async def test_a_scripted_reply_of_another_kind_is_refused() -> None:
    with pytest.raises(TypeError, match="made of texts and items, and not of 5"):
        await ScriptedModel([5]).get_response(asked())


def test_helpers_write_items_as_servers_do() -> None:
    assert calls("pay", "{broken")["arguments"] == "{broken"
    assert calls("pay", namespace="shop")["namespace"] == "shop"
    assert refuses("no")["content"] == [{"type": "refusal", "refusal": "no"}]
    agent = Agent(name="Refund Desk")
    assert hands_over(agent)["name"] == "transfer_to_refund_desk"
    assert hands_over("Refund Desk")["name"] == "transfer_to_refund_desk"
    assert hands_over(Handoff(agent=agent))["name"] == "transfer_to_refund_desk"
    assert hands_over(Handoff(agent=agent, name="refund"), {"why": 1})["name"] == "refund"


# --- ids -----------------------------------------------------------------------------------------


async def test_each_item_has_an_id_of_its_own_that_another_process_would_give_too() -> None:
    script = [["a", "a", reasons("r"), calls("pay")], ["a"]]
    first = await replies_of(ScriptedModel(script), 2, user("hi"))
    again = await replies_of(ScriptedModel(script), 2, user("hi"))
    assert first == again
    ids = [item["id"] for items in first for item in items]
    assert len(set(ids)) == len(ids) == 5
    assert first[0][3]["call_id"].startswith("call_")
    elsewhere = await replies_of(ScriptedModel(script), 2, user("hi"), user("ho"))
    assert elsewhere[0][0]["id"] not in ids


async def test_the_items_of_a_script_are_copied() -> None:
    item = says("hello") | {"id": "msg_mine"}
    (items,) = await replies_of(ScriptedModel([item]), 1)
    assert items == [item]
    assert items[0] is not item


# --- what was asked ------------------------------------------------------------------------------


async def test_requests_are_kept_as_they_were_when_they_were_sent() -> None:
    model = ScriptedModel(["hello"])
    live = [user("hi")]
    await model.get_response(ModelRequest(input=live, instructions="Be kind."))
    live.append(says("hello"))
    (request,) = model.requests
    assert (request.input, request.instructions) == ([user("hi")], "Be kind.")


async def test_a_request_after_the_last_reply_says_what_was_asked() -> None:
    model = ScriptedModel(["hello"])
    request = asked(
        user("once more"),
        instructions="Be kind.",
        tools=(ToolSpec(name="pay", description="", parameters={}),),
    )
    await model.get_response(request)
    expected = "all of its 1 replies .* 'Be kind.'; 1 items, .*once more.*; tools: pay"
    with pytest.raises(AssertionError, match=expected):
        await model.get_response(request)
    with pytest.raises(AssertionError, match="all of its 0 replies"):
        await streamed(ScriptedModel([]), request)


def test_several_threads_get_each_reply_once() -> None:
    model = ScriptedModel([str(number) for number in range(200)])
    got: list[Any] = []

    def ask() -> None:
        async def some() -> list[Any]:
            return [await model.get_response(asked()) for _ in range(50)]

        got.extend(reply.items[0]["content"][0]["text"] for reply in asyncio.run(some()))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got, key=int) == [str(number) for number in range(200)]


# --- streams -------------------------------------------------------------------------------------


async def test_a_stream_has_the_pieces_and_then_the_reply() -> None:
    script = [[reasons("so"), "hello", refuses("no"), calls("pay", "{}", "c1")]]
    *deltas, reply = await streamed(ScriptedModel(script, delta_chars=4), asked())
    assert deltas == [
        ModelDelta(kind="reasoning", text="so"),
        ModelDelta(kind="text", text="hell"),
        ModelDelta(kind="text", text="o"),
        ModelDelta(kind="refusal", text="no"),
        ModelDelta(kind="arguments", text="{}", call_id="c1"),
    ]
    assert reply == await ScriptedModel(script).get_response(asked())


async def test_a_stream_that_breaks_off_fails_after_its_deltas() -> None:
    failed = ModelFailed("m", "the stream ended early", is_retryable=True)
    model = ScriptedModel([breaks_off("hello", failed), breaks_off("hello", failed)])
    parts = model.stream_response(asked())
    assert await anext(parts) == ModelDelta(kind="text", text="hello")
    with pytest.raises(ModelFailed):
        await anext(parts)
    with pytest.raises(ModelFailed):
        await model.get_response(asked())


# --- without a state -----------------------------------------------------------------------------


async def test_a_stateless_model_answers_by_the_outputs_in_the_input() -> None:
    seen: list[ModelRequest] = []
    script = [calls("pay", {}, "c1"), [calls("pay", {}, "c2"), calls("pay", {}, "c3")], "done"]

    async def reply_to(*items: Item) -> list[Item]:
        model = StatelessModel(script, on_call=seen.append)
        whole = await model.get_response(asked(*items))
        assert (await streamed(model, asked(*items)))[-1] == whole
        return [{name: item[name] for name in item if name != "id"} for item in whole.items]

    assert await reply_to(user("hi")) == [script[0]]
    assert await reply_to(user("hi"), output("c1")) == script[1]
    assert await reply_to(user("hi"), output("c1"), output("c2")) == script[1]
    assert await reply_to(*map(output, ("c1", "c2", "c3"))) == [says("done")]
    assert len(seen) == 8


async def test_a_stateless_model_needs_ids_of_calls_and_a_last_reply() -> None:
    with pytest.raises(AssertionError, match="reply 1 of the script has a call without a call_id"):
        await StatelessModel([calls("pay")]).get_response(asked())
    with pytest.raises(AssertionError, match="has given all of its 1 replies"):
        await StatelessModel([calls("pay", {}, "c1")]).get_response(asked(output("c1")))
