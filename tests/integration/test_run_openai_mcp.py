"""Agents with MCP servers, which an app registers before it could connect them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from agents import Agent
from agents.mcp import MCPServerStdio

from capsule_tasks.openai_agents import OpenAIEngine
from capsule_tasks.storage import RunStore
from tests.agents_script import StatelessModel, calls, says
from tests.integration.durable_agents import Runs

SHOP = """
import sys
from mcp.server.mcpserver import MCPServer

shop = MCPServer("shop")
with open(sys.argv[1], "a") as log:
    print("started", file=log)


@shop.tool()
def buy(what: str) -> str:
    with open(sys.argv[1], "a") as log:
        print("bought", what, file=log)
    return f"a {what}"


shop.run()
"""
PATIENCE_S = 60


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
async def made() -> AsyncIterator[list[OpenAIEngine]]:
    """Engines that are closed in the end."""
    engines: list[OpenAIEngine] = []
    yield engines
    for engine in engines:
        await engine.aclose()


def shop(log: Path, *, program: str = SHOP, **options: Any) -> MCPServerStdio:
    parameters: Any = {"command": sys.executable, "args": ["-c", program, str(log)]}
    return MCPServerStdio(parameters, client_session_timeout_seconds=PATIENCE_S, **options)


def buyer(server: MCPServerStdio) -> Agent[Any]:
    model = StatelessModel([calls("buy", '{"what": "hat"}', "c1")], [says("done")])
    return Agent(name="buyer", model=model, mcp_servers=[server])


async def test_a_server_is_connected_once_for_all_runs_of_a_process(
    store: RunStore, log: Path
) -> None:
    server = shop(log)
    engine = OpenAIEngine(buyer(server))
    runs = Runs(store, engine)
    for run_id in ("a", "b", "c"):
        await runs.start(run_id=run_id)
    stops = await asyncio.gather(runs.drive("a"), runs.drive("b"))
    assert {stop.status for stop in (*stops, await runs.drive("c"))} == {"completed"}
    assert sorted(log.read_text().splitlines()) == ["bought hat"] * 3 + ["started"]
    await engine.aclose()
    assert server.session is None


async def test_another_process_goes_on_with_a_call_of_a_server_that_waits(
    store: RunStore, log: Path, made: list[OpenAIEngine]
) -> None:
    made += [OpenAIEngine(buyer(shop(log, require_approval="always"))) for _ in range(2)]
    first, second = Runs(store, made[0]), Runs(store, made[1])
    await first.start()
    assert (await first.drive()).status == "interrupted"
    assert await first.approve_all() == ['bare:buy {"what": "hat"}']
    assert (await second.drive()).status == "completed"
    assert log.read_text().splitlines() == ["started", "started", "bought hat"]


async def test_a_server_that_was_connected_is_left_to_whoever_did(
    store: RunStore, log: Path
) -> None:
    async with shop(log) as server:
        engine = OpenAIEngine(buyer(server))
        runs = Runs(store, engine)
        await runs.start()
        assert (await runs.drive()).status == "completed"
        await engine.aclose()
        assert server.session is not None
    assert log.read_text().splitlines() == ["started", "bought hat"]


async def test_a_server_that_cannot_be_connected_fails_the_run_and_is_tried_again(
    store: RunStore, log: Path, made: list[OpenAIEngine]
) -> None:
    server = shop(log, program="raise SystemExit(1)")
    made.append(OpenAIEngine(buyer(server)))
    runs = Runs(store, made[0])
    await runs.start(run_id="a")
    stop = await runs.drive("a")
    assert stop.status == "failed"
    assert stop.failure is not None
    assert stop.failure.kind == "error"
    server.params.args[1] = SHOP  # the server is mended
    await runs.start(run_id="b")
    assert (await runs.drive("b")).status == "completed"


async def test_a_server_that_died_is_connected_again(
    store: RunStore, log: Path, made: list[OpenAIEngine], caplog: pytest.LogCaptureFixture
) -> None:
    program = SHOP.replace('"started"', '"started", os.getpid()').replace("import", "import os,", 1)
    server = shop(log, program=program)
    made.append(OpenAIEngine(buyer(server)))
    runs = Runs(store, made[0])
    for run_id in ("a", "b", "c"):
        await runs.start(run_id=run_id)
    assert (await runs.drive("a")).status == "completed"
    os.kill(int(log.read_text().split()[1]), signal.SIGKILL)
    stops = await asyncio.gather(runs.drive("b"), runs.drive("c"))
    assert {stop.status for stop in stops} == {"completed"}
    assert log.read_text().count("started") == 2
    assert "does not answer" in caplog.text


async def test_a_cancel_of_a_drive_that_connects_hands_the_run_back(
    store: RunStore, log: Path, made: list[OpenAIEngine]
) -> None:
    """The connection is made all the same, for others that may wait for it."""
    os.mkfifo(gate := log.with_name("gate"))
    server = shop(log, program=f"import sys; open(sys.argv[1], 'w'); open({str(gate)!r})\n{SHOP}")
    made.append(OpenAIEngine(buyer(server)))
    runs = Runs(store, made[0])
    await runs.start()
    drive = asyncio.create_task(runs.drive())
    async with asyncio.timeout(PATIENCE_S):
        while not log.exists():
            await asyncio.sleep(0.01)  # a poll: the process gives no signal
    drive.cancel()
    with pytest.raises(asyncio.CancelledError):
        await drive
    assert (await store.read("r")).status == "queued"
    with gate.open("w"):
        assert (await runs.drive()).status == "completed"
    assert log.read_text().splitlines() == ["started", "bought hat"]
