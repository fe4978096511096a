"""Every rule of preparing and saving in durable runs: watched or not, guardrails in each order."""

from __future__ import annotations

import msgspec
import pytest

from capsule_tasks import RunConfig
from capsule_tasks.durable import RunDriver
from capsule_tasks.storage import RunStore
from capsule_tasks.testing.models import ScriptedModel
from tests.integration.agents.runs import runs_of
from tests.unit.runs.engine.cases import BEFORE, CASES, Case
from tests.unit.runs.engine.runs import MODES, Mode, spelled


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
async def test_what_is_committed(store: RunStore, case: Case, mode: Mode) -> None:
    model = ScriptedModel(case.replies)
    config = RunConfig(model=model, **case.config)
    agent = case.agent_of(parallel=mode.parallel)
    runs = runs_of(store, agent, run_config=config, **case.options)
    await runs.history("r").add_items(BEFORE)
    await runs.start("hi")
    publish = runs.events.append if mode.streamed else None
    stop = await RunDriver(store, "w1").drive("r", runs.engine, publish=publish)

    items = await runs.items()
    case.check_stored(items)
    if case.error is None:
        assert stop.status == "completed"
        assert (await store.read("r")).result == msgspec.json.encode(case.output)
    else:
        assert stop.status == "failed"
        assert stop.failure is not None
        assert stop.failure.type == case.error.__name__
    if case.seen is not None:
        assert [spelled(list(request.input)) for request in model.requests] == case.seen
    if mode.streamed:
        shown = spelled([event.data for event in runs.events if event.kind == "item"])
        stored = spelled(items)
        assert [each for each in shown if each in stored] == stored[3:]
