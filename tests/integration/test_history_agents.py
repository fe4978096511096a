"""The real openai-agents package keeps its conversations in a History."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import openai
import pytest
import redis
from agents import (
    Agent,
    ModelRetrySettings,
    ModelSettings,
    RunConfig,
    Runner,
    Session,
    SessionSettings,
    function_tool,
    handoff,
    retry_policies,
    set_tracing_disabled,
)
from agents.extensions.memory.encrypt_session import EncryptedSession
from agents.memory import OpenAIResponsesCompactionSession
from agents.models.multi_provider import MultiProvider

from capsule_tasks import History, SyncHistory
from capsule_tasks.settings import HistorySettings
from capsule_tasks.storage import AsyncConnections
from capsule_tasks.storage.encryption import encrypted
from capsule_tasks.storage.operations import Reply
from capsule_tasks.storage.scripts import Call
from tests.agents_script import ScriptedModel, calls, says
from tests.servers import fresh_prefix

set_tracing_disabled(True)
KEY = b"k" * 32
GUIDE = Path(__file__).parents[2] / "docs" / "history.md"


@pytest.fixture
def settings() -> HistorySettings:
    return HistorySettings(prefix=fresh_prefix())


def kinds(items: list[dict[str, Any]]) -> list[str]:
    return [item.get("type", item.get("role")) for item in items]


@function_tool
def weather(city: str) -> str:
    return f"sunny in {city}"


@function_tool
def fails() -> str:
    raise ValueError("no such thing")


def test_a_history_is_a_session_of_openai_agents(valkey_url: str) -> None:
    assert isinstance(History("s", valkey_url), Session)


@pytest.mark.full
def test_a_type_checker_takes_it_for_a_session(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(
        "from agents import Session\n"
        "from capsule_tasks import History, SyncHistory\n"
        "session: Session = History('s', 'redis://localhost')\n"
        "count: int = len(SyncHistory('s', 'redis://localhost').get_items(limit=3))\n"
        "SyncHistory('s', 'redis://localhost').get_items(limit='3')\n"
    )
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path), "user.py"]
    ended = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert "user.py:5" in ended.stdout
    assert "Found 1 error" in ended.stdout, ended.stdout


def test_the_example_of_the_guide(
    valkey_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ScriptedModel(says("Up."), says("Up, too."))
    monkeypatch.setattr(MultiProvider, "get_model", lambda *_: model)
    monkeypatch.setenv("REDIS_URL", valkey_url)
    with SyncHistory("user-42", valkey_url) as history:  # of the guide's other examples
        history.clear_session()
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    (example,) = [block for block in blocks if "Runner.run" in block]
    exec(compile(example, str(GUIDE), "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.splitlines() == ["Up.", "Up, too."]
    assert [len(asked) for asked in model.asked] == [1, 3]


async def test_a_conversation_is_kept_in_order(valkey_url: str, settings: HistorySettings) -> None:
    model = ScriptedModel(says("hello"), says("you said hi"))
    agent = Agent(name="helper", model=model)
    async with History("user-42", valkey_url, settings=settings) as session:
        assert (await Runner.run(agent, "hi", session=session)).final_output == "hello"
        assert (await Runner.run(agent, "what?", session=session)).final_output == "you said hi"
        assert kinds(await session.get_items()) == ["user", "message", "user", "message"]
    assert [len(asked) for asked in model.asked] == [1, 3]


@pytest.mark.parametrize("sealed", [False, True], ids=["plain", "encrypted"])
async def test_tools_and_handoffs_over_many_turns(
    valkey_url: str, settings: HistorySettings, sealed: bool
) -> None:
    expert = Agent(name="expert", model=ScriptedModel(says("it depends")))
    model = ScriptedModel(
        [calls("weather", '{"city":"Oslo"}', "c1"), calls("weather", '{"city":"Rome"}', "c2")],
        says("sunny in both"),
        calls("fails", "{}", "c3"),
        says("that failed"),
        calls("transfer_to_expert", "{}", "c4"),
    )
    agent = Agent(name="helper", model=model, tools=[weather, fails], handoffs=[handoff(expert)])
    async with History("user-42", valkey_url, settings=settings) as history:
        session = encrypted(history, [KEY]) if sealed else history
        await Runner.run(agent, "weather?", session=session)
        await Runner.run(agent, "try", session=session)
        last = await Runner.run(agent, "why?", session=session)
        assert last.last_agent is expert
        items = await session.get_items()
    assert kinds(items) == [
        "user", "function_call", "function_call", "function_call_output", "function_call_output",
        "message", "user", "function_call", "function_call_output", "message", "user",
        "function_call", "function_call_output", "message",
    ]  # fmt: skip
    assert [item["output"] for item in items if item.get("type") == "function_call_output"][:2] == [
        "sunny in Oslo", "sunny in Rome",
    ]  # fmt: skip


async def test_a_retried_model_call_leaves_its_input_once(
    valkey_url: str, settings: HistorySettings
) -> None:
    lost = openai.APIConnectionError(request=httpx2.Request("POST", "http://localhost"))
    model = ScriptedModel(says("hello"), lost, lost, says("again"))
    retry = ModelRetrySettings(
        max_retries=3, backoff={"initial_delay": 0.0}, policy=retry_policies.network_error()
    )
    agent = Agent(name="helper", model=model, model_settings=ModelSettings(retry=retry))
    async with History("user-42", valkey_url, settings=settings) as session:
        await Runner.run(agent, "hi", session=session)
        await Runner.run(agent, "more", session=session)
        assert kinds(await session.get_items()) == ["user", "message", "user", "message"]
    assert len(model.asked) == 4


async def test_a_run_that_fails_keeps_the_turns_that_were_done(
    valkey_url: str, settings: HistorySettings
) -> None:
    model = ScriptedModel(calls("weather", '{"city":"Oslo"}', "c1"), RuntimeError("gone"))
    agent = Agent(name="helper", model=model, tools=[weather])
    async with History("user-42", valkey_url, settings=settings) as session:
        with pytest.raises(RuntimeError):
            await Runner.run(agent, "weather?", session=session)
        assert kinds(await session.get_items()) == [
            "user", "function_call", "function_call_output",
        ]  # fmt: skip


async def test_a_limit_of_the_run_overrides_the_sessions(
    valkey_url: str, settings: HistorySettings
) -> None:
    model = ScriptedModel(*[says(f"answer {n}") for n in range(4)])
    agent = Agent(name="helper", model=model)
    async with History(
        "user-42", valkey_url, settings=settings, session_settings=SessionSettings(limit=2)
    ) as session:
        await Runner.run(agent, "1", session=session)
        await Runner.run(agent, "2", session=session)
        await Runner.run(agent, "3", session=session)
        limited = RunConfig(session_settings=SessionSettings(limit=4))
        await Runner.run(agent, "4", session=session, run_config=limited)
        assert [len(asked) for asked in model.asked] == [1, 3, 3, 5]
        assert len((await session.read()).items) == 8


class Compactor:
    """Stands for OpenAI's client: `responses.compact` answers with one summary."""

    def __init__(self, before: Any = None) -> None:
        self.responses = self
        self.calls: list[dict[str, Any]] = []
        self._before = before

    async def compact(self, **asked: Any) -> Any:
        self.calls.append(asked)
        if self._before is not None:
            await self._before()
        return SimpleNamespace(output=[says("summary").model_dump()], usage=None)


@pytest.mark.parametrize("mode", ["automatic", "manual"])
async def test_its_compaction_replaces_the_items_it_has_read(
    valkey_url: str, settings: HistorySettings, mode: str
) -> None:
    async with History("user-42", valkey_url, settings=settings) as history:
        client = Compactor()
        session: Any = OpenAIResponsesCompactionSession(
            "user-42",
            history,
            client=client,  # type: ignore[arg-type]
            compaction_mode="input",
            should_trigger_compaction=lambda context: (
                mode == "automatic" and len(context["session_items"]) >= 4
            ),
        )
        agent = Agent(name="helper", model=ScriptedModel(says("one"), says("two"), says("three")))
        await Runner.run(agent, "1", session=session)
        await Runner.run(agent, "2", session=session)
        if mode == "manual":
            await session.run_compaction({"force": True, "compaction_mode": "input"})
        assert len(client.calls) == 1
        items = await history.get_items()
        assert [item["content"][0]["text"] for item in items] == ["summary"]
        await Runner.run(agent, "3", session=session)
        assert kinds(await history.get_items()) == ["message", "user", "message"]


async def test_its_compaction_loses_nothing_that_another_process_appends(
    valkey_url: str, settings: HistorySettings
) -> None:
    async with (
        History("user-42", valkey_url, settings=settings) as history,
        History("user-42", valkey_url, settings=settings) as other,
    ):
        client = Compactor(before=lambda: other.add_items([{"role": "user", "content": "late"}]))
        session: Any = OpenAIResponsesCompactionSession(
            "user-42",
            history,
            client=client,  # type: ignore[arg-type]
            compaction_mode="input",
            should_trigger_compaction=lambda context: len(context["session_items"]) >= 2,
        )
        agent = Agent(name="helper", model=ScriptedModel(says("one")))
        await Runner.run(agent, "1", session=session)
        items = await history.get_items()
        assert kinds(items) == ["message", "user"]
        assert items[1]["content"] == "late"


class Watched(AsyncConnections):
    """Connections that keep in mind which scripts changed a history."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.writes: list[str] = []

    async def run(self, call: Call) -> Reply:
        if call.operation_id is not None:
            self.writes.append(call.script.name)
        return await super().run(call)


def compacting(history: Any, client: Any, at: int = 1000) -> Any:
    return OpenAIResponsesCompactionSession(
        "user-42",
        history,
        client=client,
        compaction_mode="input",
        should_trigger_compaction=lambda context: len(context["session_items"]) >= at,
    )


def envelope(session: EncryptedSession, text: str, age_s: int = 0) -> dict[str, Any]:
    """An item as that session seals it, some time ago."""
    item = json.dumps({"role": "user", "content": text}).encode()
    token = session.cipher.encrypt_at_time(item, int(time.time()) - age_s).decode()
    return {"__enc__": 1, "v": 1, "kid": "hkdf-v1", "payload": token}


async def test_compaction_through_its_encrypted_session_is_one_step_and_loses_nothing(
    valkey_url: str, settings: HistorySettings
) -> None:
    """Compaction once cleared and added, which lost records under another key."""
    watched = Watched(valkey_url)
    other = History("user-42", watched, settings=settings)
    history = History("user-42", watched, settings=settings)
    late = {"role": "user", "content": "late"}
    client = Compactor(before=lambda: other.add_items([late]))
    session: Any = EncryptedSession("user-42", compacting(history, client, at=2), "a" * 32)
    stranger: Any = EncryptedSession("user-42", history, "b" * 32)
    foreign = envelope(stranger, "under another key")
    await other.add_items([envelope(session, f"old {n}", age_s=5000) for n in range(3)])
    await other.add_items([foreign, envelope(session, "older", age_s=5000)])
    watched.writes.clear()
    agent = Agent(name="helper", model=ScriptedModel(says("one")))
    await Runner.run(agent, "1", session=session)
    assert len(client.calls) == 1
    assert watched.writes.count("history/replace") == 1
    assert "history/clear" not in watched.writes
    items = await history.get_items()
    assert (items[0], items[-1]) == (foreign, late), "expired at the front, or more, is there"
    (summary,) = await session.get_items()
    assert summary["content"][0]["text"] == "summary"
    await watched.close()


@pytest.mark.parametrize("sealed", [False, True], ids=["plain", "encrypted"])
async def test_a_compaction_by_hand_is_one_step(
    valkey_url: str, settings: HistorySettings, sealed: bool
) -> None:
    watched = Watched(valkey_url)
    history = History("user-42", watched, settings=settings)
    session: Any = compacting(history, Compactor())
    if sealed:
        session = EncryptedSession("user-42", session, "a" * 32)
    await session.add_items([{"role": "user", "content": f"{n}"} for n in range(5)])
    watched.writes.clear()
    await session.run_compaction({"force": True, "compaction_mode": "input"})
    assert watched.writes == ["history/replace"]
    (summary,) = await session.get_items()
    assert summary["content"][0]["text"] == "summary"
    await watched.close()


async def test_a_subclass_with_its_own_items_is_not_compacted_past_them(
    valkey_url: str, settings: HistorySettings
) -> None:
    class Shouting(History):
        """Items are stored in another form than they are given in."""

        async def add_items(self, items: Any, **options: Any) -> None:
            await super().add_items([{"stored": item} for item in items], **options)

        async def get_items(self, limit: int | None = None) -> list[Any]:
            return [item["stored"] for item in await super().get_items(limit)]

    async with Shouting("user-42", valkey_url, settings=settings) as history:
        by_itself = compacting(history, Compactor(), at=2)
        agent = Agent(name="helper", model=ScriptedModel(says("one")))
        await Runner.run(agent, "1", session=by_itself)
        assert [item["content"][0]["text"] for item in await history.get_items()] == ["summary"]
        await compacting(history, Compactor()).run_compaction(
            {"force": True, "compaction_mode": "input"}
        )
        assert [item["content"][0]["text"] for item in await history.get_items()] == ["summary"]


async def test_corrupt_records_go_to_quarantine_when_items_around_them_are_compacted(
    valkey_url: str, settings: HistorySettings
) -> None:
    async with History("user-42", valkey_url, settings=settings) as history:
        session = compacting(history, Compactor(), at=4)
        agent = Agent(name="helper", model=ScriptedModel(says("one"), says("two")))
        with redis.Redis.from_url(valkey_url) as client:
            for question in ("1", "2"):
                client.rpush(history.core._keys.items, b"{")
                await Runner.run(agent, question, session=session)
        found = await history.read()
        assert [item["content"][0]["text"] for item in found.items] == ["summary"]
        assert found.corrupt == 1, "the record before the compacted items was touched"
        assert (await history.info()).quarantined == 1


SETTINGS = {
    "mapping": {"limit": 2},
    "object": SimpleNamespace(limit=2),
    "its own": SessionSettings(limit=2),
}


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "encrypted"])
@pytest.mark.parametrize("kind", SETTINGS)
async def test_its_runner_takes_settings_of_any_kind(
    valkey_url: str, settings: HistorySettings, kind: str, wrapped: bool
) -> None:
    model = ScriptedModel(*[says(f"answer {n}") for n in range(3)])
    agent = Agent(name="helper", model=model)
    async with History(
        "user-42", valkey_url, settings=settings, session_settings=SETTINGS[kind]
    ) as history:
        session: Any = EncryptedSession("user-42", history, "a" * 32) if wrapped else history
        await session.add_items([{"role": "user", "content": f"{n}"} for n in range(6)])
        await Runner.run(agent, "1", session=session)
        overridden = RunConfig(session_settings=SessionSettings(limit=4))
        await Runner.run(agent, "2", session=session, run_config=overridden)
        silent = RunConfig(session_settings=SessionSettings())
        await Runner.run(agent, "3", session=session, run_config=silent)
    assert [len(asked) for asked in model.asked] == [3, 5, 3]


def test_one_history_in_several_loops_and_threads(
    valkey_url: str, settings: HistorySettings
) -> None:
    history = History("user-42", valkey_url, settings=settings)
    together = threading.Barrier(4)

    async def converse(number: int) -> None:
        model = ScriptedModel(
            calls("weather", '{"city":"Oslo"}', f"c{number}"), says(f"answer {number}")
        )
        agent = Agent(name="helper", model=model, tools=[weather])
        await Runner.run(agent, f"question {number}", session=history)

    def run(number: int) -> None:
        together.wait()
        for turn in range(3):
            asyncio.run(converse(number * 10 + turn))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(4)))
    items = asyncio.run(history.get_items())
    assert sorted(kinds(items)) == sorted(
        ["user", "function_call", "function_call_output", "message"] * 12
    )
