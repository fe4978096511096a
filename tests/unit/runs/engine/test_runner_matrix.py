"""Every rule of preparing and saving, in each mode: streamed or not, guardrails in each order."""

from __future__ import annotations

import pytest

from capsule_tasks.runs.agents.run_config import RunConfig
from capsule_tasks.testing.models import ScriptedModel
from tests.unit.runs.engine.cases import BEFORE, CASES, Case
from tests.unit.runs.engine.runs import MODES, MemorySession, Mode, spelled


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
async def test_what_is_stored(case: Case, mode: Mode) -> None:
    model = ScriptedModel(case.replies)
    agent = case.agent_of(parallel=mode.parallel)
    session = MemorySession(BEFORE)
    config = RunConfig(model=model, **case.config)
    ended = await mode.run(agent, "hi", session=session, run_config=config, **case.options)

    case.check_stored(session.items)
    stored = spelled(session.items)
    assert type(ended.error) is (case.error or type(None))
    if ended.error is None:
        assert ended.result.final_output == case.output
        assert spelled(ended.result.items) == stored[3:]
    else:
        assert spelled(list(ended.error.items)) == stored[3:]
    if case.seen is not None:
        assert [spelled(list(request.input)) for request in model.requests] == case.seen
    if mode.streamed:
        shown = [event.data for event in ended.events if event.kind == "item"]
        assert [each for each in spelled(shown) if each in stored] == stored[3:]

    # The session is as it was before, and nothing else was taken out of it.
    popped = await (ended.error or ended.result).rewind()
    assert popped.removed
    assert session.items == BEFORE
