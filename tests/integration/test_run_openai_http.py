"""Durable runs whose model is behind HTTP: the SDK's own models, the official client, a server."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import pytest
from agents import (
    Agent,
    HostedMCPTool,
    ModelRetrySettings,
    ModelSettings,
    OpenAIResponsesModel,
    WebSearchTool,
    retry_policies,
)
from agents.models import openai_provider
from openai import DefaultAsyncHttpx2Client

from capsule_tasks.openai_agents import OpenAIEngine
from capsule_tasks.settings import RunSettings
from capsule_tasks.storage import RunRecord, RunStore
from capsule_tasks.storage.runs.store import SyncLease, SyncRunStore
from tests.agents_script import calls, says
from tests.integration.durable_agents import LOOK, Runs, brief, look
from tests.integration.http_models import PAY, Clients, cashier, pay
from tests.integration.killing import KILLED, LASTING, runs_to_its_end
from tests.integration.responses_server import KEY, MODEL, Refusal, Reply, Request, ResponsesServer


def asked(request: Request) -> list[Any]:
    """The items of a request: what kind, which call, which output."""
    return brief(request.body["input"])


def events(runs: Runs, kind: str = "raw_response_event") -> list[Any]:
    return [event.data["type"] for event in runs.events if event.kind == kind]


# --- what a run is made of -----------------------------------------------------------------------


async def test_a_run_with_tools_and_an_approval(store: RunStore, clients: Clients) -> None:
    with ResponsesServer([LOOK], [PAY], says("paid it")) as server:
        runs = Runs(store, clients.engine(server))
        await runs.start()
        assert (await runs.drive()).status == "interrupted"
        assert await runs.approve_all() == ['bare:pay {"euros": 5}']
        assert (await runs.drive()).result == b'"paid it"'
        assert asked(server.requests[-1]) == brief(await runs.items())[:-1]
        assert {request.body["model"] for request in server.requests} == {MODEL}
        assert all(request.is_streamed for request in server.requests)
        assert server.requests[0].body["instructions"] == "Pay."
    usages = [event.data["usage"] for event in runs.events if event.kind == "turn"]
    assert usages[-1] == {"requests": 3, "input_tokens": 30, "output_tokens": 15}


async def test_a_handoff_and_an_agent_as_a_tool(store: RunStore, clients: Clients) -> None:
    """The agent as a tool asks its model without streaming."""
    clerk = Agent(name="clerk", instructions="I am the clerk.", model=MODEL, tools=[pay])
    desk = Agent(name="desk", model=MODEL, tools=[clerk.as_tool("ask_clerk", "Ask.")])
    front = Agent(name="front", model=MODEL, handoffs=[desk])
    with ResponsesServer(
        [calls("transfer_to_desk", "{}", "c_hand")],
        [calls("ask_clerk", '{"input": "pay"}', "c_ask")],
        [PAY],
        says("paid it"),
        says("all done"),
    ) as server:
        runs = Runs(store, clients.engine(server, front))
        await runs.start()
        assert await runs.to_end() == "completed"
        assert [request.is_streamed for request in server.requests] == [
            *(True, True),
            *(False, False),
            True,
        ]
        assert server.requests[2].body["instructions"] == "I am the clerk."
    kinds = [(kind, output) for kind, _, output in brief(await runs.items())]
    assert kinds[-2:] == [("function_call_output", "paid it"), ("message", None)]


async def test_a_model_instance_of_the_sdk(store: RunStore, clients: Clients) -> None:
    with ResponsesServer([LOOK], says("done")) as server:
        model = OpenAIResponsesModel(MODEL, clients.of(server))
        runs = Runs(store, OpenAIEngine(Agent(name="a", model=model, tools=[look])))
        await runs.start()
        assert (await runs.drive()).result == b'"done"'


async def test_events_are_told_while_the_model_still_answers(
    store: RunStore, clients: Clients
) -> None:
    """created, in progress, item added, part added, first delta: and the turn has not ended."""
    with ResponsesServer([LOOK], Reply([says("one two three four")], held_after=5)) as server:
        runs = Runs(store, clients.engine(server))
        await runs.start()
        drive = asyncio.create_task(runs.drive())
        await asyncio.to_thread(server.wait_until, lambda: server.held)
        before = (await store.read("r")).turn
        async with asyncio.timeout(20):
            while events(runs)[-1] != "response.output_text.delta":
                await asyncio.sleep(0.001)
        assert (before, (await store.read("r")).turn) == (1, 1)
        assert not drive.done()
        server.release()
        assert (await drive).status == "completed"
    told = events(runs)
    second = told[told.index("response.completed") + 1 :]
    assert second == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * 3,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    wholes = [event.data["response"] for event in runs.events if "response" in (event.data or {})]
    assert len(wholes) == 6
    assert not any({"instructions", "tools"} & whole.keys() for whole in wholes)
    deltas = [
        event.data["delta"]
        for event in runs.events
        if event.kind == "raw_response_event" and event.data["type"] == "response.output_text.delta"
    ]
    assert "".join(deltas) == "one two three four"
    arguments = [kind for kind in told if "function_call_arguments" in kind]
    assert arguments[0] == "response.function_call_arguments.delta"
    assert arguments[-1] == "response.function_call_arguments.done"


async def test_items_of_hosted_tools_pass_through(store: RunStore, clients: Clients) -> None:
    search = {
        "id": "ws_1",
        "type": "web_search_call",
        "status": "completed",
        "action": {"type": "search", "query": "door", "queries": ["door"]},
    }
    thought = {
        "id": "rs_1",
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": "hm"}],
        "encrypted_content": "gAAA",
    }
    request = {
        "id": "mcpr_1",
        "type": "mcp_approval_request",
        "server_label": "shop",
        "name": "buy",
        "arguments": '{"what": "door"}',
    }
    bought = {
        "id": "mcp_1",
        "type": "mcp_call",
        "server_label": "shop",
        "name": "buy",
        "arguments": '{"what": "door"}',
        "output": "bought",
        "status": "completed",
    }
    server_tool = HostedMCPTool(
        tool_config={
            "type": "mcp",
            "server_label": "shop",
            "server_url": "https://shop.example",
            "require_approval": "always",
            "authorization": "token-of-the-shop",
        }
    )
    agent = Agent(name="a", model=MODEL, tools=[WebSearchTool(), server_tool])
    with ResponsesServer([search, thought, request], [bought, says("bought it")]) as server:
        runs = Runs(store, clients.engine(server, agent))
        await runs.start()
        assert (await runs.drive()).status == "interrupted"
        assert await runs.approve_all() == ['hosted_mcp:shop/buy {"what": "door"}']
        assert (await runs.drive()).result == b'"bought it"'
        sent = server.requests[1].body["input"]
    assert [item.get("type") or item["role"] for item in sent] == [
        "user",
        "web_search_call",
        "reasoning",
        "mcp_approval_request",
        "mcp_approval_response",
    ]
    assert sent[2]["encrypted_content"] == "gAAA"
    assert (sent[4]["approval_request_id"], sent[4]["approve"]) == ("mcpr_1", True)
    kinds = [kind for kind, _, _ in brief(await runs.items())]
    assert kinds[-2:] == ["mcp_call", "message"]
    assert "token-of-the-shop" in json.dumps(server.requests[0].body)


async def test_a_reply_of_a_megabyte(store: RunStore, clients: Clients) -> None:
    long = "wide " * 210_000
    call = calls("look", json.dumps({"what": long}), "c_long")
    with ResponsesServer([call], says(long)) as server:
        runs = Runs(store, clients.engine(server))
        await runs.start()
        stop = await runs.drive()
        assert json.loads(stop.result) == long
        assert asked(server.requests[1])[-1] == ("function_call_output", "c_long", f"saw {long}")


async def test_one_pool_of_connections_serves_all_turns(store: RunStore, clients: Clients) -> None:
    turns = [calls("look", '{"what": "x"}', f"c{number}") for number in range(8)]
    with ResponsesServer(*turns, says("done"), *turns, says("done")) as server:
        runs = Runs(store, clients.engine(server))
        for run_id in ("r1", "r2"):
            await runs.start(run_id=run_id)
            assert (await runs.drive(run_id)).status == "completed"
        assert len(server.requests) == 18
        assert server.connections == 1


async def test_runs_side_by_side_share_the_connections(store: RunStore, clients: Clients) -> None:
    def answer(body: dict[str, Any]) -> list[Any]:
        return [says("done")] if any("output" in item for item in body["input"]) else [LOOK]

    run_ids = [f"r{number}" for number in range(6)]
    with ResponsesServer(script=answer) as server:
        runs = Runs(store, clients.engine(server))
        for run_id in run_ids:
            await runs.start(run_id=run_id)
        stops = await asyncio.gather(*(runs.drive(run_id) for run_id in run_ids))
        assert {stop.result for stop in stops} == {b'"done"'}
        assert len(server.requests) == 12
        assert server.connections <= 6


async def test_without_a_run_config_the_environment_names_the_server(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client is made with the first model call, and outlives the turns."""
    engine = OpenAIEngine(cashier())
    with ResponsesServer([LOOK], [PAY], says("paid it")) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        async with DefaultAsyncHttpx2Client() as http:
            monkeypatch.setattr(openai_provider, "_http_client", http)
            runs = Runs(store, engine)
            await runs.start()
            assert await runs.to_end() == "completed"
            assert server.connections == 1
    await engine.aclose()


# --- crashes -------------------------------------------------------------------------------------


class Mortal:
    """Processes that drive one run; each of them may die when it is about to commit a new turn."""

    def __init__(self, server: ResponsesServer, url: str, prefix: str) -> None:
        self._server = server
        self._url = url
        self._settings = RunSettings(prefix=prefix)
        asyncio.run(self._start())

    async def _start(self) -> None:
        async with RunStore(self._url, settings=self._settings) as store:
            await Runs(store, OpenAIEngine(cashier())).start()

    def drive(
        self, worker: str, *, dies: bool = False, dies_at: int | None = None, **options: Any
    ) -> bool:
        """Drive the run to its end; False if the process died before.

        It dies at its first commit, or at this turn of its loop.
        """

        async def main() -> None:
            async with RunStore(self._url, settings=self._settings) as store:
                runs = Runs(store, Clients().engine(self._server, cashier(**options)), worker)
                if dies:
                    store.commit = _death  # type: ignore[method-assign]
                await runs.to_end()

        prefix = self._settings.prefix
        with SyncLease(worker, self._url, settings=LASTING, prefix=prefix) as lease:
            lease.acquire()
            is_done = runs_to_its_end(main, dies_at)
            lease.release()
        return is_done

    def journal(self) -> list[bytes]:
        """The replies that a process left in the journal."""
        with (
            SyncRunStore(self._url, settings=self._settings) as store,
            SyncLease("reader", self._url, prefix=self._settings.prefix) as lease,
        ):
            lease.acquire()
            claim = store.claim("r", "reader")
            store.release(claim)
            lease.release()
        return list(claim.journal.values())

    def record(self) -> RunRecord:
        with SyncRunStore(self._url, settings=self._settings) as store:
            return store.read("r")


async def _death(*_: Any, **__: Any) -> Any:
    os._exit(KILLED)


def test_a_reply_that_was_journaled_is_not_asked_for_again(valkey_url: str, prefix: str) -> None:
    with ResponsesServer([LOOK], [PAY], says("paid it")) as server:
        mortal = Mortal(server, valkey_url, prefix)
        assert not mortal.drive("w1", dies=True)
        assert mortal.drive("w2", dies=False)
        assert len(server.requests) == 3
        assert [output for *_, output in asked(server.requests[-1])][-1] == "paid 5"
        assert ("function_call_output", "c1", "saw door") in asked(server.requests[-1])


def test_a_reply_that_came_with_a_second_attempt_is_not_asked_for_again(
    valkey_url: str, prefix: str
) -> None:
    """The attempt that failed left no reply, so that it must not count for the journal's key."""
    retry = ModelRetrySettings(max_retries=1, policy=retry_policies.http_status([500]))
    settings = ModelSettings(retry=retry)
    refusal = Refusal(500, {"x-should-retry": "false"})
    with ResponsesServer(refusal, [LOOK], [PAY], says("paid it")) as server:
        mortal = Mortal(server, valkey_url, prefix)
        assert not mortal.drive("w1", dies=True, model_settings=settings)
        assert mortal.drive("w2", dies=False, model_settings=settings)
        assert len(server.requests) == 4
        assert ("function_call_output", "c1", "saw door") in asked(server.requests[-1])


@pytest.mark.parametrize("dies_at", range(20, 250, 37))
def test_a_run_killed_at_any_await_asks_at_most_once_more(
    valkey_url: str, prefix: str, dies_at: int
) -> None:
    """Only the call that the kill has cut is made again: no reply is lost that had come whole."""

    def answer(body: dict[str, Any]) -> list[Any]:
        known = {item.get("call_id") for item in body["input"] if "output" in item}
        if "c1" not in known:
            return [LOOK]
        return [says("paid it")] if "c_pay" in known else [PAY]

    with ResponsesServer(script=answer) as server:
        mortal = Mortal(server, valkey_url, prefix)
        if not mortal.drive("w1", dies_at=dies_at):
            assert mortal.drive("w2")
        assert len(server.requests) <= 3 + 1
        assert len({len(request.body["input"]) for request in server.requests}) == 3
    assert mortal.record().result == b'"paid it"'


@pytest.mark.parametrize("has_usage", [True, False])
def test_a_reply_from_the_journal_is_the_reply_of_the_model(
    valkey_url: str, prefix: str, has_usage: bool
) -> None:
    """Ids of requests and usage, too; instructions and tools are not journaled."""
    settings = ModelSettings(preserve_raw_usage=True)
    answers = [
        Reply([LOOK], has_usage=has_usage),
        Reply([PAY], has_usage=has_usage),
        Reply([says("paid it")], has_usage=has_usage),
    ]

    def responses(name: str, *, dies: bool) -> Any:
        with ResponsesServer(*answers) as server:
            mortal = Mortal(server, valkey_url, f"{prefix}:{name}")
            assert mortal.drive("w1", dies=dies, model_settings=settings) is not dies
            if dies:
                (reply,) = mortal.journal()
                assert b"Pay." not in reply
                assert b"look_description" not in reply
                assert mortal.drive("w2", dies=False, model_settings=settings)
            return json.loads(mortal.record().snapshot)["model_responses"]

    found = responses("killed", dies=True)
    assert found == responses("whole", dies=False)
    assert [each["request_id"] for each in found] == ["req_1", "req_2", "req_3"]
    assert sum(each["usage"]["requests"] for each in found) == 3
    assert sum(each["usage"]["input_tokens"] for each in found) == 30 * has_usage
