"""The calls of the store that the driver makes in a turn, on a real server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from capsule_tasks.durable import RunDriver, TurnEnd, TurnWork
from capsule_tasks.storage import PlannedCall, RunStore
from tests.integration.scripted_engine import ScriptedEngine, items_of, started


@pytest.fixture
def made(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The scripts that were called, in their order."""
    names: list[str] = []
    run = store.store.run

    async def noted(call: Any) -> Any:
        names.append(call.script.name.rpartition("/")[2])
        return await run(call)

    monkeypatch.setattr(store.store, "run", noted)
    return names


@pytest.mark.parametrize(
    ("turn", "calls"),
    [
        (["held"], ["commit"]),
        (["held", "tool a"], ["start_calls", "finish_calls", "commit"]),
        (["held", "tools a b c d e"], ["start_calls", "finish_calls", "commit"]),
        (["model", "tools a b c d e"], ["journal", "start_calls", "finish_calls", "commit"]),
    ],
)
async def test_a_turn_makes_so_many_calls_of_the_store(
    store: RunStore, made: list[str], turn: list[str], calls: list[str]
) -> None:
    engine = ScriptedEngine([["held"], turn, ["held"]])
    await (await started(store, engine)).drive("r", engine)
    first = made.index("commit")
    assert made[first + 1 : made.index("commit", first + 1) + 1] == calls
    assert [item["did"] for item in await items_of(store)][1] == [
        " ".join(word.split()[1:]) or "reply 1" for word in turn
    ]


async def test_a_drive_that_is_cancelled_hands_its_replies_on(
    store: RunStore, made: list[str]
) -> None:
    """A worker that is stopped while something else of the turn takes long."""
    is_asked = asyncio.Event()

    class Telling(ScriptedEngine):
        async def turn(self, work: TurnWork) -> TurnEnd:
            if self.asked:
                self.turns = [["held"]]
            asyncio.get_running_loop().call_soon(self._tell)
            return await super().turn(work)

        def _tell(self) -> None:
            if self.asked:
                is_asked.set()
            else:
                asyncio.get_running_loop().call_soon(self._tell)

    engine = Telling([["held", "sleep"]])
    driver = await started(store, engine)
    drive = asyncio.create_task(driver.drive("r", engine))
    await is_asked.wait()
    drive.cancel()
    with pytest.raises(asyncio.CancelledError):
        await drive
    assert made.index("journal") < made.index("release")
    assert (await RunDriver(store, "w1").drive("r", engine)).result == b'["reply 0"]'
    assert engine.asked == 1


async def test_a_turn_that_is_parked_within_goes_on_with_its_replies(store: RunStore) -> None:
    """The reply is held, and the only call that it asks for has to be settled."""
    engine = ScriptedEngine([["held", "tool a"]], on_uncertain="park")
    driver = await started(store, engine)
    claim = await store.claim("r", "w1")
    await store.start_calls(claim, [PlannedCall("a", engine.tool("a").fingerprint)])
    await store.release(claim)
    assert (await driver.drive("r", engine)).status == "interrupted"
    (waiting,) = (await store.read("r")).pending
    await store.approvals.reject("r", waiting.call_id, message="leave it")
    assert (await driver.drive("r", engine)).result == b'["reply 0","leave it"]'
    assert engine.asked == 1
